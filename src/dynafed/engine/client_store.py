"""Clients' states between rounds: kept in memory up to a limit, beyond it on disk, as files that never change.

Each state is named by (client, round in which it was made). A checkpoint only lists those names, so a round costs what
its own clients cost, however many clients exist, and an older checkpoint still finds the files that it lists. The
folder is searched once, at a process's first checkpoint; from then on the store knows which files nobody needs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from dynafed import tree
from dynafed.engine.files import checksum, remove, write_bytes
from dynafed.tree import Tree

Name = tuple[int, int]
Listing = dict[int, tuple[int, str]]
"""Client -> the round that its current state is from, and its file's checksum."""


class ClientStore:
    """The states of all clients that have one."""

    def __init__(self, folder: Path, limit: int, listing: Mapping[int, tuple[int, str]] | None = None) -> None:
        self.folder = folder
        self.limit = limit
        self.rounds = {client: made for client, (made, _) in (listing or {}).items()}
        self.checksums = {(client, made): digest for client, (made, digest) in (listing or {}).items()}
        self.cache: OrderedDict[Name, Tree] = OrderedDict()
        self.cached = 0
        self.staged: set[Name] = set()
        self.unlisted: set[Name] = set()
        """Written since the last listing."""
        self.outdated: dict[Path, set[Name]] = {}
        """By checkpoint, newest first: what it lists and later ones don't. Empty until one is written."""

    def load(self, client: int) -> Tree:
        """The client's state; empty if it has none."""
        if client not in self.rounds:
            return {}
        name = (client, self.rounds[client])
        if name not in self.cache:
            self._cache_state(name, tree.unpack(self._file(name).read_bytes()))
        self.cache.move_to_end(name)
        return self.cache[name]

    def stage(self, client: int, round_num: int, state: Tree) -> None:
        """Hold a new state, which counts only once it is committed."""
        if state:
            self.staged.add((client, round_num))
            self._drop((client, round_num))
            self._cache_state((client, round_num), state)

    def commit(self, accepted: Collection[int]) -> None:
        """Make the staged states of these clients current and forget the others'."""
        for client, round_num in self.staged:
            if client in accepted:
                self._drop((client, self.rounds.get(client, 0)))
                self.rounds[client] = round_num
            else:
                self._drop((client, round_num))
        self.staged.clear()

    def write_listing(self) -> Listing:
        """Write what is only in memory, and list every current state."""
        for name in self.rounds.items():
            self._write(name)
        self.unlisted.clear()
        return {client: (made, self.checksums[client, made]) for client, made in self.rounds.items()}

    def find_damaged(self) -> str | None:
        """The first listed file that is missing or changed, if any."""
        for name in self.rounds.items():
            file = self._file(name)
            if not file.exists() or checksum(file.read_bytes()) != self.checksums[name]:
                return file.name
        return None

    def knows(self, checkpoint: Path) -> bool:
        """Whether `prune` was told of a checkpoint."""
        return checkpoint in self.outdated

    def prune(self, kept: Mapping[Path, Listing]) -> None:
        """Delete the files that no checkpoint needs any more.

        `kept` are those that stay, newest first, with what they list if it was another process that wrote them.
        """
        first, gone = not self.outdated, self.outdated
        self.outdated = {checkpoint: gone.pop(checkpoint, set()) for checkpoint in kept}
        for names in gone.values():
            for name in names:
                remove(self._file(name))
        if first:
            self._sweep(kept)

    def _sweep(self, kept: Mapping[Path, Listing]) -> None:
        """Delete every file that no checkpoint lists, whoever wrote it."""
        needed = set(self.rounds.items())
        for checkpoint, listing in kept.items():
            names = {(client, made) for client, (made, _) in listing.items()}
            self.outdated[checkpoint] |= names - needed
            needed |= names
        wanted = {self._file(name) for name in needed}
        for file in self.folder.glob("*/*"):
            if file not in wanted:
                remove(file)

    def _cache_state(self, name: Name, state: Tree) -> None:
        self.cache[name] = state
        self.cached += tree.nbytes(state)
        while self.cached > self.limit and len(self.cache) > 1:
            oldest = next(iter(self.cache))
            self._write(oldest)
            self.cached -= tree.nbytes(self.cache.pop(oldest))

    def _drop(self, name: Name) -> None:
        if (state := self.cache.pop(name, None)) is not None:
            self.cached -= tree.nbytes(state)
        if self.checksums.pop(name, None) is None:
            return
        if name in self.unlisted:
            self.unlisted.remove(name)
            remove(self._file(name))
        elif self.outdated:
            self.outdated[next(iter(self.outdated))].add(name)

    def _write(self, name: Name) -> None:
        if name not in self.checksums:
            content = tree.pack(self.cache[name])
            write_bytes(self._file(name), content)
            self.checksums[name] = checksum(content)
            self.unlisted.add(name)

    def _file(self, name: Name) -> Path:
        return state_file(self.folder, *name)


def state_file(folder: Path, client: int, round_num: int | str) -> Path:
    """Where the state that a client made in a round is kept."""
    return folder / f"{client % 256:02x}" / f"{client}-{round_num}.safetensors"


class ReceiptStore(ClientStore):
    """For a server whose clients keep their states themselves: which of them count, but not what is in them.

    In a state's place stands its receipt: the round that it was made in, and its file's checksum.
    """

    def load(self, client: int) -> Tree:
        """The receipt of the client's state; empty if it has none."""
        made = self.rounds.get(client)
        return {} if made is None else receipt(made, self.checksums[client, made])

    def stage(self, client: int, round_num: int, state: Tree) -> None:
        """Take note of a new state, which counts only once it is committed; or of one that the client has lost."""
        if not state:
            return
        made, digest = read_receipt(state)
        if made == LOST:
            self.rounds.pop(client, None)
        else:
            self.staged.add((client, round_num))
            self.checksums[client, round_num] = digest

    def find_damaged(self) -> str | None:
        """Nobody knows before the client is asked."""
        return None


EMPTY_CHECKSUM = checksum(b"")

LOST = 0
"""The round on the receipt of a client that has lost its state."""


def receipt(round_num: int, digest: str) -> Tree:
    """What stands for a client's state where the state itself isn't."""
    return {"round": torch.tensor(round_num), "checksum": torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)}


def read_receipt(state: Tree) -> tuple[int, str]:
    """The inverse of `receipt`; a client may have written it, so it is looked at closely."""
    digest = bytes(state["checksum"].tolist()).hex()
    if len(digest) != len(EMPTY_CHECKSUM):
        raise ValueError(f"a checksum of {len(digest)} digits")
    return int(state["round"]), digest

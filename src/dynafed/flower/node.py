"""What a node's clients remember between rounds: in Flower's context, and on the node's disk if it has a folder for it.

The server only holds receipts (`engine.memory.Receipts`), and each order says which state counts. So an update that the
server rejected, or a round that it repeats, leaves no trace here: the state that it made is never asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict

from dynafed import tree
from dynafed.engine.files import checksum, write_bytes
from dynafed.engine.memory import memory_file, read_receipt, receipt
from dynafed.tree import Tree


class Lost(Exception):
    """A client doesn't have the state that the server has a receipt of."""


@dataclass(frozen=True)
class NodeMemory:
    """The states of one client, by the round that they were made in."""

    client: int
    state: RecordDict
    """Of Flower's context."""
    folder: Path | None = None

    def recall(self, asked: Tree) -> Tree:
        """The state that the server has this receipt of; empty if it has none."""
        if not asked:
            return {}
        round, sum = read_receipt(asked)
        for blob in self._copies(round):
            if checksum(blob) == sum:
                return tree.unpack(blob)
        raise Lost(f"client {self.client} has lost what it remembered from round {round}: it starts afresh next time")

    def keep(self, round: int, state: Tree) -> Tree:
        """Keep what was made in a round; returns the receipt."""
        if not state:
            return {}
        blob = tree.pack(state)
        self.state[self._name(round)] = ConfigRecord({"state": blob})
        if self.folder:
            write_bytes(memory_file(self.folder, self.client, round), blob)
        return receipt(round, checksum(blob))

    def forget(self, asked: Tree, before: int) -> None:
        """Drop what is later than the state that counts, and what no checkpoint since round `before` can ask for."""
        current = read_receipt(asked)[0] if asked else 0
        oldest = max((round for round in self._rounds() if round <= min(before, current)), default=0)
        for round in self._rounds():
            if round > current or round < oldest:
                self.state.pop(self._name(round), None)
                if self.folder:
                    memory_file(self.folder, self.client, round).unlink(missing_ok=True)

    def _rounds(self) -> set[int]:
        names = [name for name in self.state if name.startswith(self._name(""))]
        if self.folder:
            names += [file.stem for file in self.folder.glob(f"*/{self.client}-*.safetensors")]
        return {int(name.rpartition("-")[2]) for name in names}

    def _copies(self, round: int) -> Iterator[bytes]:
        if (record := self.state.config_records.get(self._name(round))) is not None:
            blob = record["state"]
            assert isinstance(blob, bytes)
            yield blob
        if self.folder and (file := memory_file(self.folder, self.client, round)).exists():
            yield file.read_bytes()

    def _name(self, round: int | str) -> str:
        return f"dynafed-{self.client}-{round}"

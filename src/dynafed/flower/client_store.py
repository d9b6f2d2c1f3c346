"""Keeps the states of a node's clients between rounds: in Flower's context, and on the node's disk if it has a folder.

The server only holds receipts (`engine.client_store.ReceiptStore`), and each train request says which state to start
from. So an update that the server rejected, or a round that it repeats, has no effect here: its state is never
requested.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict

from dynafed import tree
from dynafed.engine.client_store import read_receipt, receipt, state_file
from dynafed.engine.files import checksum, write_bytes
from dynafed.tree import Tree


class StateLost(Exception):
    """A client doesn't have the state that the server has a receipt of."""


@dataclass(frozen=True)
class NodeClientStore:
    """The states of one client, by the round that they were made in."""

    client: int
    context_state: RecordDict
    folder: Path | None = None

    def load(self, requested: Tree) -> Tree:
        """The state that this receipt stands for; empty if the receipt is."""
        if not requested:
            return {}
        round_num, expected = read_receipt(requested)
        for blob in self._copies(round_num):
            if checksum(blob) == expected:
                return tree.unpack(blob)
        raise StateLost(
            f"client {self.client} has lost what it remembered from round {round_num}: it starts afresh next time"
        )

    def save(self, round_num: int, state: Tree) -> Tree:
        """Store the state made in a round; returns its receipt."""
        if not state:
            return {}
        blob = tree.pack(state)
        self.context_state[self._key(round_num)] = ConfigRecord({"state": blob})
        if self.folder:
            write_bytes(state_file(self.folder, self.client, round_num), blob)
        return receipt(round_num, checksum(blob))

    def prune(self, requested: Tree, before: int) -> None:
        """Delete what is later than the requested state, and what no checkpoint since round `before` can request."""
        current = read_receipt(requested)[0] if requested else 0
        oldest = max((stored for stored in self._rounds() if stored <= min(before, current)), default=0)
        for stored in self._rounds():
            if stored > current or stored < oldest:
                self.context_state.pop(self._key(stored), None)
                if self.folder:
                    state_file(self.folder, self.client, stored).unlink(missing_ok=True)

    def _rounds(self) -> set[int]:
        keys = [key for key in self.context_state if key.startswith(self._key(""))]
        if self.folder:
            keys += [file.stem for file in self.folder.glob(f"*/{self.client}-*.safetensors")]
        return {int(key.rpartition("-")[2]) for key in keys}

    def _copies(self, round_num: int) -> Iterator[bytes]:
        if (record := self.context_state.config_records.get(self._key(round_num))) is not None:
            blob = record["state"]
            assert isinstance(blob, bytes)
            yield blob
        if self.folder and (file := state_file(self.folder, self.client, round_num)).exists():
            yield file.read_bytes()

    def _key(self, round_num: int | str) -> str:
        return f"dynafed-{self.client}-{round_num}"

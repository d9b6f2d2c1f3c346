"""What a checkpoint of many clients' states costs, and which of their files it leaves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from problems import TEST, TRAIN, run_tiny, tiny

import dynafed
from dynafed.callbacks import Callback, Record, RunContext
from dynafed.engine import checkpoint, client_store
from dynafed.engine.files import write_bytes

MANY: dict[str, Any] = {"method": "scaffold", "clients": 40, "participation": 0.1, "partition": "iid"}


def listed(path: Path) -> set[Path]:
    """The files that the checkpoints of a run need."""
    folder, found = path / "clients", set()
    for each in checkpoint.found(path):
        body = checkpoint.read_body(each)
        assert body is not None
        found |= {
            client_store.state_file(folder, client, made) for client, (made, _) in checkpoint.listing(body).items()
        }
    return found


class CountFiles(Callback):
    """Counts the clients' files that each checkpoint reads, writes, deletes or searches for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now: Counter[str] = Counter()
        self.rounds: list[Counter[str]] = []
        for owner, name in (
            *((Path, name) for name in ("read_bytes", "glob", "exists")),
            *((client_store, name) for name in ("remove", "write_bytes")),
        ):
            patch.setattr(owner, name, self.counted(name, getattr(owner, name)))

    def counted(self, name: str, function: Any) -> Any:
        def call(path: Path, *args: Any) -> Any:
            self.now[name] += "clients" in path.parts or path.name.startswith("state.")
            return function(path, *args)

        return call

    def on_round_end(self, run: RunContext, record: Record) -> None:
        self.now.clear()

    def on_checkpoint(self, run: RunContext, path: Path) -> None:
        self.rounds.append(self.now.copy())


def test_a_checkpoint_touches_the_files_of_changed_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        count = CountFiles(patch)
        config = tiny(**MANY, rounds=30, checkpoint_every=1)
        done = dynafed.run(config, train=TRAIN, test=TEST, out=tmp_path / "r", callbacks=[count])
    assert len(done.state.clients.rounds) > 30
    for touched in count.rounds[1:]:
        assert touched["write_bytes"] == 4
        assert touched["remove"] <= 4
        assert touched["read_bytes"] <= 1  # is this very checkpoint there already?
        assert not touched["exists"] + touched["glob"]


@pytest.mark.parametrize("memory", [0, 1024])
def test_only_files_that_a_checkpoint_lists_stay(tmp_path: Path, memory: int) -> None:
    path = tmp_path / "r"
    run_tiny(path, **MANY, rounds=7, checkpoint_every=3, client_memory_mb=memory)
    assert set((path / "clients").glob("*/*")) == listed(path)
    write_bytes(path / "clients" / "01" / "1-999.safetensors", b"of a process that was killed")
    dynafed.resume(path, train=TRAIN, test=TEST, changes={"rounds": 12, "keep_checkpoints": 3})
    assert set((path / "clients").glob("*/*")) == listed(path)
    assert len(checkpoint.found(path)) == 3

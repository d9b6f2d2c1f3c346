"""A record of how a model came about: who took part in each round, what was rejected, and a digest of every model.

`callbacks = ["provenance"]` in a config leaves `provenance.json` in the run's folder. Its entries are chained: each
holds the checksum of the one before, so none can be changed, left out or put in without all that follow. The last
checksum stands for the whole; sign that one.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from dynafed import tree
from dynafed.callbacks import Callback, Record, RunContext
from dynafed.engine.files import checksum, write_json
from dynafed.errors import UserError
from dynafed.version import __version__

KEPT = (
    *("clients", "client_names", "dropped", "rejected", "attackers", "skipped", "synthesis_refused", "restarted"),
    "epsilon",
)
"""What an entry takes from a round's record."""


class Provenance(Callback):
    """Writes provenance.json after every round. The digest of a round is that of the model that was served."""

    name = "provenance"

    def on_run_begin(self, run: RunContext) -> None:
        """Begin a chain, or go on with that of the rounds before a resume."""
        self.file = run.path / "provenance.json"
        self.entries: list[dict[str, Any]] = []
        if run.round and self.file.is_file():
            self.entries = [entry for entry in verify(self.file)["entries"] if entry.get("round", 0) <= run.round]
        versions = {"dynafed": __version__, "python": platform.python_version(), "torch": torch.__version__}
        began = {
            "began_after_round": run.round,
            "config": checksum(run.config.to_toml().encode()),
            "versions": versions,
        }
        self._append(began | {"model": tree.digest(run.model)})

    def on_round_end(self, run: RunContext, record: Record) -> None:
        """Add a round."""
        kept = {key: record[key] for key in KEPT if record.get(key)}
        self._append({"round": record["round"], **kept, "model": tree.digest(run.model)})

    def _append(self, entry: dict[str, Any]) -> None:
        before = self.entries[-1]["checksum"] if self.entries else ""
        entry = json.loads(json.dumps(entry | {"before": before}))
        self.entries.append(entry | {"checksum": _checksum(entry)})
        write_json(self.file, {"entries": self.entries, "checksum": self.entries[-1]["checksum"]})


def verify(file: str | Path) -> dict[str, Any]:
    """What a provenance.json says; raises `UserError` if its chain is broken."""
    try:
        content: dict[str, Any] = json.loads(Path(file).read_text("utf-8"))
        entries = content["entries"]
        before = ""
        for number, entry in enumerate(entries):
            plain = {key: value for key, value in entry.items() if key != "checksum"}
            if entry["before"] != before or entry["checksum"] != _checksum(plain):
                raise UserError(f"{file} was changed: its chain breaks at entry {number}")
            before = entry["checksum"]
        if content["checksum"] != before:
            raise UserError(f"{file} was changed: its last entries are missing")
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no record of provenance: {type(error).__name__}") from None
    return content


def _checksum(entry: dict[str, Any]) -> str:
    return checksum(json.dumps(entry, sort_keys=True).encode())

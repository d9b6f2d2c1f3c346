"""A grid of runs. Each cell is an ordinary run folder: a finished one is skipped, a stopped one goes on.

Several processes may work on the same grid, in any order: a cell that another one holds is skipped, and looked at again
at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynafed.callbacks import Callback
from dynafed.config import EXECUTION_KEYS, Config
from dynafed.engine.files import checksum, lock_folder, make_folder
from dynafed.engine.run import resume, run
from dynafed.engine.sharing import KeepFirstRounds, begins_alike, start_from
from dynafed.engine.summary import read_summary
from dynafed.engine.trust import load_run_config
from dynafed.errors import FolderBusy, RunFailed, UserError
from dynafed.stages import next_run

CellCallbacks = Callable[[str], Sequence[Callback]]
"""Gets a run's title and returns the callbacks that follow it."""


GIVEN = ("dataset", "partition", "clients", "model")
"""Keys that say "custom", or a number of clients, if data or a model are given in Python."""


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    title: str
    config: Config
    path: Path


Outcome = dict[str, Any] | UserError | RunFailed
"""A finished cell's summary, or why it isn't finished."""


def config_digest(config: Config) -> str:
    """The same for two configs if and only if they decide the same result."""
    return checksum(json.dumps(config.deciding(), sort_keys=True).encode())


def run_cells(
    cells: Sequence[Cell],
    callbacks: CellCallbacks = lambda title: (),
    keep_going: bool = False,
    parts: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Cell, Outcome]]:
    """Run what isn't finished, and yield each cell with its outcome.

    A cell that fails ends the grid, unless `keep_going`. One that another process holds has
    `FolderBusy` as its outcome. `parts` are given to every run: data and models of the caller's own.
    """

    def attempt(cell: Cell) -> Outcome:
        try:
            return _run_cell(cell, cells, callbacks, parts or {})
        except FolderBusy as busy:
            return busy
        except (UserError, RunFailed) as error:
            if not keep_going:
                raise
            return error

    held = []
    for cell in cells:
        outcome = attempt(cell)
        if isinstance(outcome, FolderBusy):
            held.append(cell)
        else:
            yield cell, outcome
    yield from ((cell, attempt(cell)) for cell in held)


def _run_cell(cell: Cell, cells: Sequence[Cell], callbacks: CellCallbacks, parts: Mapping[str, Any]) -> dict[str, Any]:
    """A run's summary: taken from its folder if it is done, else run or resumed."""
    path, config = cell.path, cell.config
    with lock_folder(make_folder(path), patience=0, name=".cell"):
        if (path / "config.toml").exists():
            _check_same(path, config, GIVEN if parts else ())
            if not parts and (summary := read_summary(path)):  # else a resume compares the data that are given
                return summary
        else:
            sources = [other.path for other in cells if begins_alike(config, other.config) and not parts]
            if not any((source / "config.toml").exists() and start_from(config, path, source) for source in sources):
                return run(config, out=path, callbacks=_followed(cell, cells, callbacks), **parts).summary
        changes = {
            key: value
            for key, value in config.to_dict().items()
            if key in EXECUTION_KEYS - {"kernels", "kernels_version"}
        }
        followed = _followed(cell, cells, callbacks)
        return resume(path, changes=changes, callbacks=followed, trust=config, **parts).summary


def _followed(cell: Cell, cells: Sequence[Cell], callbacks: CellCallbacks) -> list[Callback]:
    """The callbacks of a cell; if others begin like it, one that keeps their first rounds."""
    next_run(cell.title, cells.index(cell) + 1, len(cells))
    needed = any(begins_alike(other.config, cell.config) for other in cells)
    return [*callbacks(cell.title), *([KeepFirstRounds()] if needed else [])]


def _check_same(path: Path, config: Config, given: Sequence[str]) -> None:
    """Refuse a folder with another config; keys that depend on what was `given` in Python don't count."""
    before, wanted = load_run_config(path, config).deciding(), config.deciding()
    keys = before.keys() & wanted.keys() - {*given} if given else before | wanted
    if different := sorted(key for key in keys if before.get(key) != wanted.get(key)):
        raise UserError(f"{path} holds a run with another {different[0]}: choose another --out")

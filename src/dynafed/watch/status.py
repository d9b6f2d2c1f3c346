"""How far runs are, from their files alone: nothing in a run's folder is imported, unpickled or written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from dynafed.engine.files import is_locked
from dynafed.errors import UserError
from dynafed.report.load import Run, find_runs, load_run, read_synthesis, snapshots

FRESH = 60.0
"""Seconds after its last sign of life in which a run counts as running, where its lock can't be seen."""

Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Status:
    """How far a run is."""

    run: Run
    state: str
    """"running", "stopped" or "done"."""
    changed: float
    """When its files last changed, in seconds since 1970."""
    place: int
    """Its number in the order in which runs were found."""
    seconds_left: float | None = None
    iterations: tuple[int, int] | None = None
    """(done, total) of a synthesis that is under way."""
    synthesis_ahead: bool = False
    """Whether a synthesis is still to come, whose time isn't known."""
    losses: dict[int, float] = field(default_factory=dict)
    """The matching loss by iteration of the last synthesis."""
    pictures: tuple[tuple[int, Path], ...] = ()
    """(iteration, file) of the synthetic samples so far."""

    @property
    def rounds(self) -> tuple[int, int]:
        """(done, planned)."""
        return self.run.done, self.run.planned


class Watcher:
    """Looks at the runs in some folders, again and again; only what has changed is read anew."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = [Path(path) for path in paths]
        for path in self.paths:
            if path.exists() and not path.is_dir():
                raise UserError(f"{path} is a file: dynafed watch needs a run's folder, or a folder of runs")
        self._known: dict[Path, tuple[Stamp, Run, dict[int, float]]] = {}
        self._locked: set[Path] = set()
        self._began: dict[Path, tuple[int, float]] = {}

    def look(self, now: float | None = None) -> list[Status]:
        """The runs as they are now, the one that changed last first."""
        now = time.time() if now is None else now
        found = [status for path in self._find() if (status := self._status(path, now)) is not None]
        return sorted(found, key=lambda status: (status.state != "running", -status.changed))

    def _find(self) -> list[Path]:
        found: dict[Path, None] = {}
        for path in self.paths:
            try:
                found |= dict.fromkeys(find_runs([path]))
            except (UserError, OSError):  # no run yet, or a folder that just went
                continue
        return list(found)

    def _status(self, path: Path, now: float) -> Status | None:
        try:
            stamp = _stamp(path)
            if path not in self._known or self._known[path][0] != stamp:
                self._known[path] = (stamp, load_run(path), read_synthesis(path))
            _, run, losses = self._known[path]
            pictures = tuple(snapshots(path))
        except (UserError, OSError):
            return None
        place = list(self._known).index(path)
        changed = {name: nanoseconds / 1e9 for name, nanoseconds, _ in stamp}
        last = max(changed.values())
        state = self._state(run, now - last)
        if state != "running":
            return Status(run, state, last, place, losses=losses, pictures=pictures)
        synthesizing = changed.get("synthesis.jsonl", 0) > changed.get("metrics.jsonl", 0)
        total = run.config.get("dynafed.iterations")
        iterations = None
        if synthesizing and losses and isinstance(total, int) and max(losses) < total:
            iterations = max(losses), total
        ahead = _synthesis_ahead(run) and iterations is None
        left = self._seconds_left(run, iterations, now - changed.get("metrics.jsonl", now), now)
        return Status(run, "running", last, place, left, iterations, ahead, losses, pictures)

    def _state(self, run: Run, quiet: float) -> str:
        """A run's state, `quiet` seconds after its files last changed."""
        if is_locked(run.path):
            self._locked.add(run.path)
            return "running"
        if run.finished:
            return "done"
        return "running" if run.path not in self._locked and quiet < FRESH else "stopped"

    def _seconds_left(self, run: Run, iterations: tuple[int, int] | None, since: float, now: float) -> float | None:
        seconds = run.values("seconds")[-5:]
        if not seconds or not isinstance(run.config.get("rounds"), int):
            return None
        usual = median(seconds)
        left = float((run.config["rounds"] - run.rounds[-1]["round"]) * usual)
        if iterations is None:
            self._began.pop(run.path, None)
            return max(0.0, left - min(since, usual))
        done, total = iterations
        first, began = self._began.setdefault(run.path, (done, now))
        if done <= first:
            return None
        return left + (total - done) * (now - began) / (done - first)


def _synthesis_ahead(run: Run) -> bool:
    methods = str(run.config.get("method", "")).split("+")
    return "dynafed" in methods and not run.syntheses and not run.config.get("dynafed.synthetic")


def _stamp(path: Path) -> Stamp:
    """What changes when a run goes on: name, time and size of its files."""
    names = ("config.toml", "partition.json", "metrics.jsonl", "summary.json", "synthesis.jsonl", "report.json")
    found = []
    for name in names:
        try:
            stat = (path / name).stat()
        except OSError:
            continue
        found.append((name, stat.st_mtime_ns, stat.st_size))
    return tuple(found)

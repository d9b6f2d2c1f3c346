"""How far a run is, or several: the numbers behind every progress bar, and how they become words."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

METRICS = ("accuracy", "rmse")
"""What a run is summed up by: the first of these that it has."""

RECENT = 9
"""Rounds whose median is taken for the time of the next ones: a synthesis among them doesn't count."""

SHORT = 1.0
"""Seconds into a round from which on its stages are shown."""


def format_metric(metric: str, value: float) -> str:
    """A metric's value as people read it: a share in percent."""
    return f"{100 * value:.2f} %" if metric in ("accuracy", "f1") else f"{value:.4g}"


def clock(seconds: float) -> str:
    """Seconds as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass
class Stage:
    """Something that is done in steps."""

    name: str
    done: int = 0
    total: int = 0
    """0 if nobody knows."""
    began: float = field(default_factory=lambda: time.monotonic())

    def __post_init__(self) -> None:
        self.first, self.at = self.done, self.began

    def advance(self, done: int, total: int) -> None:
        """So many are done now."""
        self.done, self.total, self.at = done, total, time.monotonic()

    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self.began

    def left(self) -> float | None:
        """The seconds that the rest will take, at the pace so far; None if that can't be told."""
        steps = self.done - self.first
        if steps < 1 or not self.total:
            return None
        return max(0.0, (self.at - self.began) / steps * (self.total - self.done) - (time.monotonic() - self.at))

    def __str__(self) -> str:
        left = self.left()
        return "  ".join(
            [
                self.name,
                *([f"{self.done}/{self.total}"] if self.total else []),
                *([f"{clock(left)} left"] if left is not None and left >= 1 else []),
            ]
        )


@dataclass
class RunProgress:
    """One run: its rounds, and what it is doing within one."""

    title: str
    rounds: int = 0
    """In all; 0 as long as the run is only being prepared."""
    round: int = 0
    metric: str = "accuracy"
    value: float | None = None
    """Of the metric, as last measured."""
    epsilon: float | None = None
    """The privacy loss so far, of a run with differential privacy."""
    stage: Stage = field(default_factory=lambda: Stage("starting"))
    round_began: float = field(default_factory=lambda: time.monotonic())
    began: float = field(default_factory=lambda: time.monotonic())
    round_seconds: list[float] = field(default_factory=list)

    def enter(self, name: str, done: int, total: int) -> None:
        """Begin a stage, or go on with it."""
        if name == self.stage.name:
            self.stage.advance(done, total)
        else:
            self.stage = Stage(name, done, total)

    def begin_round(self, clients: int) -> None:
        """A round of so many clients begins."""
        self.round_began = time.monotonic()
        self.stage = Stage("clients", 0, clients)

    def end_round(self, record: Mapping[str, Any]) -> None:
        """A round is done."""
        self.round = record["round"]
        self.round_seconds.append(record["seconds"])
        self.epsilon = record.get("epsilon")
        self.measure(record)

    def measure(self, record: Mapping[str, Any]) -> None:
        """Keep what a round measured, if it did."""
        for metric in METRICS:
            if metric in record:
                self.metric, self.value = metric, record[metric]
                break

    def measured(self) -> str:
        """The metric and its value in words; nothing before it was measured."""
        return "" if self.value is None else f"{self.metric} {format_metric(self.metric, self.value)}"

    def busy(self) -> bool:
        """Whether the round takes long enough to say what it is at; in short ones, that would only flicker."""
        return time.monotonic() - self.round_began > SHORT

    def pace(self) -> float | None:
        """The seconds of a round; before the first one is over, guessed from its clients."""
        if self.round_seconds:
            return statistics.median(self.round_seconds[-RECENT:])
        left = self.stage.left() if self.stage.name == "clients" else None
        return None if left is None else time.monotonic() - self.round_began + left

    def left(self) -> float | None:
        """The seconds until the last round is over; a synthesis counts once it has begun."""
        pace = self.pace()
        if pace is None or not self.rounds:
            return None
        rounds_left = self.rounds - self.round
        spent = min(pace, time.monotonic() - self.round_began)
        extra = 0.0 if self.stage.name in ("clients", "evaluation") else self.stage.left() or 0.0
        return max(0.0, rounds_left * pace - spent) + extra if rounds_left else extra

    def __str__(self) -> str:
        if not self.rounds:
            return f"{self.title}: {self.stage}".removeprefix(": ")
        left = self.left()
        parts = [
            f"round {self.round} of {self.rounds}",
            *([self.measured()] if self.value is not None else []),
            *([f"epsilon {self.epsilon:.2f}"] if self.epsilon is not None else []),
            *([f"{clock(left)} left"] if left is not None else []),
        ]
        busy = f" ({self.stage})" if self.busy() else ""
        return f"{self.title}: {', '.join(parts)}{busy}"


@dataclass
class Progress:
    """Several runs, one after the other; or a single one."""

    run: RunProgress
    number: int = 1
    total: int = 1
    run_seconds: list[float] = field(default_factory=list)
    """Of the runs that were done so far, without those that were done before."""

    def left(self) -> float | None:
        """The seconds until the last run is over."""
        this = self.run.left()
        if this is None:
            return None
        each = statistics.fmean(self.run_seconds or [time.monotonic() - self.run.began + this])
        return this + each * (self.total - self.number)

    def __str__(self) -> str:
        if self.total == 1:
            return str(self.run)
        left = self.left()
        whole = f", {clock(left)} left in all" if left is not None else ""
        return f"run {self.number} of {self.total}{whole}; {self.run}"

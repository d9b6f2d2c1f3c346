"""Runs that differ only in their seed form a group: its label, its mean curve, its row in the result table."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from dynafed.config import EXECUTION_KEYS
from dynafed.report.load import Partition, Run
from dynafed.report.text import setting

DIAGNOSTIC = frozenset(("watch", "eval_every", "target_accuracy", "dynafed.evidence"))
"""Keys that decide what is measured, not what is computed."""

IGNORED = EXECUTION_KEYS | DIAGNOSTIC
"""Runs that differ only in these have the same result."""

DATA_KEYS = ("dataset", "partition", "alpha", "classes_per_client", "clients", "min_samples", "server_samples", "seed")


@dataclass(frozen=True)
class Group:
    """Runs of one config, each with its own seed."""

    label: str
    runs: tuple[Run, ...]
    place: int = 0
    """Its number among the groups of the page, which decides its color."""

    @property
    def distinct(self) -> tuple[Run, ...]:
        """One run for each seed, the longest; the same seed again isn't another observation."""
        longest: dict[Any, Run] = {}
        for run in self.runs:
            seed = run.config.get("seed", "?")
            if seed not in longest or len(run.rounds) > len(longest[seed].rounds):
                longest[seed] = run
        return tuple(longest.values())

    @property
    def seeds(self) -> list[Any]:
        """The distinct seeds, in the order of the runs."""
        return [run.config.get("seed", "?") for run in self.distinct]

    @property
    def finished(self) -> bool:
        """Whether all runs came to their end."""
        return all(run.finished for run in self.runs)

    @property
    def metric(self) -> str:
        """What its runs are summed up by."""
        return next((run.metric for run in self.runs if run.final is not None), self.runs[0].metric)

    @property
    def lower_is_better(self) -> bool:
        """Whether that should fall."""
        return any(run.lower_is_better for run in self.runs)

    def over_seeds(self, value: Callable[[Run], float | None]) -> tuple[float | None, float | None]:
        """Mean and sample standard deviation of a number over the seeds that have it."""
        return mean_std([number for run in self.distinct if (number := value(run)) is not None])


@dataclass(frozen=True)
class Curve:
    """A measure over rounds: the mean over seeds, a band around it, and how many seeds stand behind each point."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    count: list[int]


def mean_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation; None for what so few values don't tell."""
    if not values:
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def mean_curve(series: Iterable[Iterable[tuple[int, float | None]]]) -> Curve:
    """Join (round, value) series. The band is ± one standard deviation; of two values it is the range."""
    by_round: dict[int, list[float]] = {}
    for points in series:
        for round_num, value in points:
            if value is not None:
                by_round.setdefault(round_num, []).append(value)
    joined = Curve([], [], [], [], [])
    for round_num in sorted(by_round):
        values = by_round[round_num]
        mean = statistics.fmean(values)
        spread = sum((value - mean) ** 2 for value in values)
        off = math.sqrt(spread / (len(values) - 1)) if len(values) > 2 else None
        joined.rounds.append(round_num)
        joined.mean.append(mean)
        joined.low.append(min(values) if off is None else mean - off)
        joined.high.append(max(values) if off is None else mean + off)
        joined.count.append(len(values))
    return joined


def cumulative(run: Run, keys: Sequence[str]) -> list[tuple[int, float]] | None:
    """(round, sum of `keys` up to and with it); None if the run lacks one of them."""
    if not all(run.values(key) for key in keys):
        return None
    total = 0.0
    points = []
    for record in run.rounds:
        # A synthesis stands apart from the server's time, but the clock goes on.
        extra = ("seconds_synthesis",) if "seconds_server" in keys else ()
        total += sum(record.get(key) or 0 for key in (*keys, *extra))
        points.append((record["round"], total))
    return points


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ only in seed, execution and diagnostics; groups come in the order of their first run."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {key: value for key, value in run.config.items() if key not in IGNORED and key != "seed"}
        groups.setdefault(json.dumps(same, sort_keys=True, default=str), []).append(run)
    members = [tuple(sorted(group, key=_by_seed)) for group in groups.values()]
    labels = _labels([group[0].config for group in members])
    return [Group(label, group, place) for place, (label, group) in enumerate(zip(labels, members, strict=True))]


def common_round(groups: Sequence[Group]) -> int | None:
    """The last round that every run has, None where all have the same rounds."""
    lasts = {run.rounds[-1]["round"] for group in groups for run in group.distinct if run.values(run.metric)}
    return min(lasts) if len(lasts) > 1 else None


def differing_keys(configs: Sequence[Mapping[str, Any]], ignore: Iterable[str] = ()) -> list[str]:
    """Keys with more than one value among the configs that have them."""
    keys = {key: None for config in configs for key in config}
    skip = IGNORED | set(ignore)
    return [
        key
        for key in keys
        if key not in skip and len({setting(config[key]) for config in configs if key in config}) > 1
    ]


def common_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keys that every config has, with the same value."""
    first, *rest = configs
    return {key: value for key, value in first.items() if all(key in other and other[key] == value for other in rest)}


def partitions(runs: Sequence[Run]) -> list[tuple[str, Partition]]:
    """The distinct partitions among the runs, each named by whatever sets it apart."""
    distinct: dict[Partition, Run] = {}
    for run in runs:
        if run.partition is not None:
            distinct.setdefault(run.partition, run)
    configs = [{key: run.config[key] for key in DATA_KEYS if key in run.config} for run in distinct.values()]
    keys = differing_keys(configs)
    names = [
        ", ".join(f"{key}={setting(config[key])}" for key in keys if key in config)
        or (f"partition {index}" if len(configs) > 1 else "")
        for index, config in enumerate(configs, 1)
    ]
    return list(zip(names, distinct, strict=True))


def classes_for(counts: Sequence[int], share: float = 0.9) -> int:
    """The least number of classes that hold `share` of a client's samples."""
    need = share * sum(counts) - 1e-9
    held = accumulate(sorted(counts, reverse=True))
    return 1 + sum(have < need for have in held) if need > 0 else 0


def label_skew(partition: Partition) -> dict[str, float]:
    """How unlike the clients are: median classes that hold 90 %, median share of the main class, and sizes."""
    held = [row for row in partition.counts if sum(row)]
    sizes = [sum(row) for row in partition.counts]
    return {
        "classes": statistics.median([classes_for(row) for row in held] or [0]),
        "main": statistics.median([max(row) / sum(row) for row in held] or [0]),
        "even": math.ceil(0.9 * partition.classes - 1e-9),
        "smallest": min(sizes, default=0),
        "middle": statistics.median(sizes or [0]),
        "largest": max(sizes, default=0),
    }


def _labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = differing_keys(configs, ignore=("method",))
    labels = [
        ", ".join([str(config.get("method", "run")), *(f"{k}={setting(config[k])}" for k in keys if k in config)])
        for config in configs
    ]
    # Two configs can differ only in that one lacks a key; then a number tells them apart.
    return [
        f"{label} ({labels[: index + 1].count(label)})" if labels.count(label) > 1 else label
        for index, label in enumerate(labels)
    ]


def _by_seed(run: Run) -> tuple[float, str]:
    seed = run.config.get("seed")
    return (seed if isinstance(seed, int) else math.inf), str(run.path)

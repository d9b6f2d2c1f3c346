"""Our numbers beside the paper's: the rows of a table, as Markdown and as HTML."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynafed.methods import METHODS
from dynafed.report.blocks import sortable_table
from dynafed.report.groups import mean_std
from dynafed.report.text import NONE, escape, join_limited, setting
from dynafed.reproduce.paper import Column, Experiment
from dynafed.reproduce.records import Record

HEADS = (
    *("method", "ours", "paper", "difference", "FedAvg, mean of the last 20", "its own mean of the last 20"),
    *("seeds", "scaled"),
)


@dataclass(frozen=True)
class Row:
    """One method in one setting."""

    method: str
    state: str
    """Why there is no number, or how far the runs are; empty if all of them are done."""
    ours: tuple[float | None, float | None]
    """Mean and deviation over seeds, in the paper's unit."""
    paper: tuple[float, float] | None
    fedavg_mean: float | None
    """FedAvg with the mean of its last 20 models, in the same setting."""
    own_mean: float | None
    """The same of this method."""
    seeds: tuple[int, ...]
    mark: str
    """A letter, by which the notes below say how it differs from the paper's text."""

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.ours[0] is None or self.paper is None else self.ours[0] - self.paper[0]

    def texts(self, counts_rounds: bool) -> list[tuple[str, float | None]]:
        """The cells in the order of `HEADS`, each with the value to sort by."""
        digits = 1 if counts_rounds else 2
        ours, deviation = self.ours
        shown = NONE if ours is None else _with_deviation(ours, deviation, digits)
        if self.state:
            shown = self.state if ours is None else f"{shown} ({self.state})"
        paper = (_with_deviation(*self.paper, digits), self.paper[0]) if self.paper else (NONE, None)
        return [
            (self.method, None),
            (shown, ours),
            paper,
            (NONE if self.difference is None else f"{self.difference:+.{digits}f}", self.difference),
            *((NONE if value is None else f"{value:.{digits}f}", value) for value in (self.fedavg_mean, self.own_mean)),
            (join_limited(self.seeds) or NONE, None),
            (self.mark or NONE, None),
        ]


@dataclass(frozen=True)
class Table:
    """All rows of an experiment, by column, and what its marks mean."""

    rows: Mapping[str, Sequence[Row]]
    marks: Mapping[str, str]
    counts_rounds: bool

    def markdown(self) -> str:
        """A table for each column, then the marks."""
        parts = []
        for column, rows in self.rows.items():
            lines = [[text for text, _ in row.texts(self.counts_rounds)] for row in rows]
            head = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
            parts.append("\n".join([f"### {column}", "", *head, *(f"| {' | '.join(line)} |" for line in lines)]))
        return "\n\n".join([*parts, *([self.marks_text("- ")] if self.marks else [])])

    def html(self) -> str:
        """The same for the page."""
        parts = []
        for column, rows in self.rows.items():
            cells = [
                [(escape(text), text if value is None else value) for text, value in row.texts(self.counts_rounds)]
                for row in rows
            ]
            kinds = [(head, 0 < place < len(HEADS) - 2) for place, head in enumerate(HEADS)]
            parts.append(f"<h3>{escape(column)}</h3>{sortable_table(kinds, cells, style='results', label=column)}")
        marks = "".join(f"<p class='fine'>{escape(line)}</p>" for line in self.marks_text().splitlines())
        return "".join(parts) + marks

    def marks_text(self, bullet: str = "") -> str:
        """A line for each mark."""
        return "\n".join(f"{bullet}{mark}: {text}" for mark, text in self.marks.items())


def result_table(experiment: Experiment, records: Sequence[Record]) -> Table:
    """The rows of an experiment from the records of its cells."""
    marks: dict[str, str] = {}
    rows: dict[str, list[Row]] = {}
    for column in experiment.columns:
        groups: dict[tuple[str, str, str], list[Record]] = {}
        for record in records:
            if record["column"] == column.name:
                key = _differences(record, of_all=True), record["method"], _differences(record)
                groups.setdefault(key, []).append(record)
        baselines = {
            changes: _over_seeds(cells, _value(experiment, column, mean=True))[0]
            for (changes, method, _), cells in groups.items()
            if method == "fedavg"
        }
        for changes, method, text in _in_order(groups, experiment.methods):
            cells = groups[changes, method, text]
            rows.setdefault(column.name, []).append(
                Row(
                    method,
                    _state(cells, column),
                    _over_seeds(cells, _value(experiment, column)),
                    experiment.numbers.get((column.name, method)),
                    baselines.get(changes, next(iter(baselines.values()), None)),
                    _over_seeds(cells, _value(experiment, column, mean=True))[0],
                    tuple(sorted(record["seed"] for record in cells if record.get("done"))),
                    _mark(text, marks),
                )
            )
    return Table(rows, {mark: text for text, mark in marks.items()}, experiment.counts_rounds)


def _differences(record: Record, of_all: bool = False) -> str:
    """Where a cell differs from the paper's text; if `of_all`, in more than its method's own settings."""
    own = (*METHODS.names(), "server_samples") if of_all else ()
    return ", ".join(
        f"{key} = {setting(ours)} (paper: {setting(theirs)})"
        for key, (ours, theirs) in record["scaled"].items()
        if key.partition(".")[0] not in own
    )


def _in_order(groups: Mapping[tuple[str, str, str], Any], methods: Sequence[str]) -> list[tuple[str, str, str]]:
    """What was changed as in the first group first; then by method, in the paper's order."""
    changes = list(dict.fromkeys(key[0] for key in groups))
    places = {method: place for place, method in enumerate(dict.fromkeys((*methods, *(key[1] for key in groups))))}
    return sorted(groups, key=lambda key: (changes.index(key[0]), places[key[1]]))


def _value(experiment: Experiment, column: Column, mean: bool = False) -> Callable[[Record], float | None]:
    """What of a record a table shows: percent or rounds."""
    prefix = "mean_" if mean else ""

    def read(record: Record) -> float | None:
        if column.target:
            value = record.get(f"{prefix}rounds_to_target")
            return None if value is None else float(value)
        value = record.get(f"{prefix}accuracy")
        return None if value is None else 100 * float(value)

    return read


def _over_seeds(records: Sequence[Record], read: Callable[[Record], float | None]) -> tuple[float | None, float | None]:
    """Mean and deviation of the finished runs; nothing if one of them has no value."""
    values = [read(record) for record in records if record.get("done")]
    if not values or None in values:
        return None, None
    return mean_std([value for value in values if value is not None])


def _state(records: Sequence[Record], column: Column) -> str:
    """What to say about runs that aren't done, or that never reach the target."""
    seeds: dict[str, list[int]] = {}
    for record in records:
        if record["state"] != "done":
            seeds.setdefault(record["state"], []).append(record["seed"])
    open_ones = [
        state if len(which) == len(records) else f"seed {join_limited(which)}: {state}"
        for state, which in seeds.items()
    ]
    missed = [
        record for record in records if column.target and record.get("done") and not record.get("rounds_to_target")
    ]
    if missed:
        best = max(value for _, value in missed[0]["curve"])
        open_ones.append(f"not reached in {len(missed)} of {len(records)} runs, best {100 * best:.2f} %")
    return "; ".join(open_ones)


def _mark(text: str, marks: dict[str, str]) -> str:
    """The letter for a set of differences from the paper's text; the same letter for the same set."""
    if not text:
        return ""
    letters = string.ascii_lowercase
    return marks.setdefault(text, letters[len(marks)] if len(marks) < len(letters) else f"n{len(marks)}")


def _with_deviation(mean: float, deviation: float | None, digits: int) -> str:
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")

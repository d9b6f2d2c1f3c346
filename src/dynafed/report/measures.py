"""What the measures of a run mean: a name, which way is better, and a sentence for those that need one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynafed.progress import METRICS
from dynafed.report.blocks import sortable_table
from dynafed.report.clean import is_number
from dynafed.report.groups import Group
from dynafed.report.load import Run
from dynafed.report.text import THIN, duration, escape, mean_std_percent, number, percent, plural

KNOWN = frozenset(
    {"round", *METRICS, *(f"{metric}_before_refine" for metric in METRICS), "loss", "train_loss"}
    | {"bytes_up", "bytes_down", "repeats"}
    | {"bytes_enrolment", "enrolments_rejected"}
    | {"seconds", "seconds_local", "seconds_clients", "seconds_server", "seconds_eval"}
)
"""Measures that the page has a place for; any other number in metrics.jsonl gets a small chart or a row of its own."""

ONE_OFF = 10
"""What is measured in at most one of so many rounds is put into a table instead of a chart."""

D_SYN = (
    "D_syn is the small synthetic dataset that the server makes from the global models of the first rounds, without "
    "any client’s data."
)
REFINEMENT = "Refinement: in every round after the synthesis, the server trains the averaged model a little on D_syn."


@dataclass(frozen=True)
class Measure:
    """How a measure is shown."""

    name: str
    better: str = ""
    format: str = "number"
    about: str = ""

    def show(self, value: float | None) -> str:
        """A value as text."""
        if self.format == "percent":
            return percent(value)
        return duration(value) if self.format == "seconds" else number(value)

    def show_mean(self, mean: float | None, std: float | None) -> str:
        """A mean and its standard deviation as text."""
        if self.format == "percent":
            return mean_std_percent(mean, std)
        return self.show(mean) + ("" if std is None else f"{THIN}±{THIN}{self.spread(std)}")

    def spread(self, std: float) -> str:
        """A standard deviation as text, without a unit."""
        return f"{100 * std:.2f}" if self.format == "percent" else f"{std:.2g}"

    def points(self, difference: float) -> str:
        """A difference of two values as text."""
        return f"{100 * difference:.2f} points" if self.format == "percent" else number(difference)

    @property
    def title(self) -> str:
        """The name as a heading."""
        return self.name[0].upper() + self.name[1:]


MEASURES = {
    "accuracy": Measure("accuracy", "higher", "percent"),
    "accuracy_before_refine": Measure("accuracy before refinement", "higher", "percent", REFINEMENT),
    "loss": Measure("loss", "lower"),
    "rmse": Measure("RMSE", "lower", about="The root mean squared error, in the unit of the targets."),
    "rmse_before_refine": Measure("RMSE before refinement", "lower", about=REFINEMENT),
    "mae": Measure("mean absolute error", "lower"),
    "r2": Measure("R²", "higher", about="1 is exact, 0 no better than the mean."),
    "f1": Measure("F1", "higher", "percent"),
    "train_loss": Measure("clients’ training loss", "lower"),
    "matching_loss": Measure(
        "matching loss",
        "lower",
        about="The distance left between where steps on D_syn lead and the recorded model that they should reach, as a "
        "share of the distance at their start: 1 is standing still, 0 is arriving.",
    ),
    "matching_by_segment": Measure("matching loss, by segment", "lower"),
    "cosine_by_segment.D_syn": Measure(
        "cosine distance, D_syn", "lower", about="To the recorded model, after steps on D_syn."
    ),
    "cosine_by_segment.real samples": Measure(
        "cosine distance, real samples", "lower", about="The same after as many steps on as many real samples."
    ),
    "cosine_by_segment.noise": Measure(
        "cosine distance, noise", "lower", about="The same after as many steps on noise."
    ),
    "inner_lr": Measure("inner rate", about="The learning rate of the steps on D_syn inside the synthesis."),
    "invariant_share": Measure(
        "share without an effect",
        about="Of the squared way from a segment’s start to its end: in directions that predictions don’t depend on.",
    ),
    "invariant_share_unused": Measure(
        "share of unused tensors", about="Of the same way: in tensors that predictions don’t depend on at all."
    ),
    "scratch_accuracy": Measure(
        "accuracy from D_syn alone", "higher", "percent", "A new network that saw nothing but D_syn."
    ),
    "seconds_synthesis": Measure("time of the synthesis", "lower", "seconds", "Spent once, on the server."),
}

VARIANTS = {
    "_raw": "of the last global model",
    "_test": "on the server’s test samples",
    "_worst_tenth": "worst tenth of the clients",
}
"""What the end of a key adds to a measure."""


def measure(key: str) -> Measure:
    """How a key of the metrics is shown; `accuracy_raw` and the like as the accuracy, with what they add."""
    if key in MEASURES:
        return MEASURES[key]
    for suffix, words in VARIANTS.items():
        if (known := MEASURES.get(key.removesuffix(suffix))) and key.endswith(suffix):
            return replace(known, name=f"{known.name}, {words}", about="")
    kind = "percent" if key.startswith("accuracy") else "number"
    return Measure(key.replace("_", " ").replace(".", ": "), format=kind)


@dataclass(frozen=True)
class Extra:
    """Keys of the metrics that the page has no fixed place for."""

    varying: list[str]
    """Drawn as a small chart each."""
    constant: dict[str, float]
    """The same in every round."""
    once: list[str]
    """Measured in few rounds: rows of a table. A family such as `matching_by_segment.0` counts as one key."""


def extra_keys(runs: Sequence[Run]) -> Extra:
    """Sort the other numbers in the metrics by how they are shown."""
    seen: dict[str, list[float]] = {}
    often: set[str] = set()
    for run in runs:
        count: dict[str, int] = {}
        for record in run.rounds:
            for key, value in record.items():
                if key not in KNOWN and not key.startswith("watch.") and is_number(value):
                    seen.setdefault(key, []).append(value)
                    count[key] = count.get(key, 0) + 1
        often |= {key for key, times in count.items() if times > max(1, len(run.rounds) / ONE_OFF)}
    return Extra(
        [key for key, values in seen.items() if key in often and len(set(values)) > 1],
        {key: values[0] for key, values in seen.items() if key in often and len(set(values)) == 1},
        list(dict.fromkeys(_family(key) for key in seen if key not in often)),
    )


def once_table(groups: Sequence[Group], keys: Sequence[str]) -> str:
    """A row for each measure taken in few rounds, a column for each group that has any; means over seeds."""
    having = [group for group in groups if any(_latest(run, key) for run in group.distinct for key in keys)]
    if not having:
        return ""
    rows: list[list[tuple[str, Any]]] = []
    # The matching loss is the mean of its segments: said once.
    keys = [key for key in keys if key != "matching_by_segment" or "matching_loss" not in keys]
    order = list(MEASURES)
    for key in sorted(keys, key=lambda key: order.index(key) if key in order else len(order)):
        shown = measure(key)
        better = f" ({shown.better} is better)" if shown.better else ""
        row: list[tuple[str, Any]] = [(escape(shown.name), shown.name)]
        spans = {len(_latest(run, key)) for group in having for run in group.distinct}
        over = f" Mean over {plural(max(spans), 'segment')}." if max(spans) > 1 else ""
        for group in having:
            mean, std = group.over_seeds(lambda run, key=key: _mean_latest(run, key))  # type: ignore[misc]
            row.append((shown.show(mean) + _plus_minus(shown, std), mean))
        rows.append([*row, (escape(f"{shown.about}{over}{better}".strip()), "")])
    columns = [("Measure", False), *((escape(group.label), True) for group in having), ("What it is", False)]
    return sortable_table(columns, rows, style="once cards", label="numbers of the synthesis")


def segment_table(groups: Sequence[Group], keys: Sequence[str]) -> str:
    """Every number of the families among `keys`: a row for each segment, a column for each family and group."""
    found = [
        (f"{measure(key).name}" + (f", {group.label}" if len(groups) > 1 else ""), group, key)
        for key in keys
        for group in groups
        if any(len(_latest(run, key)) > 1 for run in group.distinct)
    ]
    if not found:
        return ""
    names = sorted({name for _, group, key in found for run in group.distinct for name in _latest(run, key)}, key=int)
    rows = [
        [
            (name, int(name)),
            *(
                (number(mean), mean)
                for mean in (
                    group.over_seeds(lambda run, key=key, name=name: _latest(run, key).get(name))[0]  # type: ignore[misc]
                    for _, group, key in found
                )
            ),
        ]
        for name in names
    ]
    table = sortable_table([("Segment", True), *((escape(name), True) for name, _, _ in found)], rows, label="segments")
    return f"<details><summary>Each of {plural(len(names), 'segment')}</summary>{table}</details>"


def _plus_minus(shown: Measure, std: float | None) -> str:
    if std is None:
        return ""
    return f" <small>± {f'{std:.2g}' if shown.format == 'number' else shown.show(std)}</small>"


def _family(key: str) -> str:
    return re.sub(r"\.\d+$", "", key)


def _latest(run: Run, family: str) -> dict[str, float]:
    """The last values of a family by the number after its name; a plain key has the empty name."""
    for record in reversed(run.rounds):
        found = {
            key[len(family) + 1 :]: value
            for key, value in record.items()
            if key == family or (key.startswith(f"{family}.") and key[len(family) + 1 :].isdecimal())
        }
        if found := {name: value for name, value in found.items() if is_number(value)}:
            return found
    return {}


def _mean_latest(run: Run, family: str) -> float | None:
    values = _latest(run, family).values()
    return sum(values) / len(values) if values else None

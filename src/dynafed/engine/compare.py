"""Several methods, several seeds, one table. Stopped or extended, it goes on where it was."""

from __future__ import annotations

import inspect
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynafed.config import Config
from dynafed.engine.files import new_folder, write_json
from dynafed.engine.grid import Cell, CellCallbacks, run_cells
from dynafed.engine.run import run
from dynafed.engine.summary import read_metrics
from dynafed.errors import UserError
from dynafed.progress import format_metric
from dynafed.report.load import name_attack
from dynafed.settings import nearest
from dynafed.terminal import with_progress

PARTS = inspect.signature(run).parameters.keys() - {"config", "out", "callbacks", "backend", "progress"}
"""Data and models that can be given in Python, to `run` as to `compare`."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `compare` leaves: a folder of runs and a row for each method and variation. A notebook shows both."""

    path: Path
    rows: list[dict[str, Any]]
    settings: tuple[str, ...] = ("method",)
    """The keys of a row in which the rows differ."""

    def __repr__(self) -> str:
        metric = self.metric
        lines = [f"  {self._name(row)}: {metric} {format_metric(metric, row[f'final_{metric}'])}" for row in self.rows]
        return "\n".join([f"Comparison in {str(self.path)!r}", *lines])

    def _repr_html_(self) -> str:
        from dynafed.notebook import comparison_html

        return comparison_html(self)

    @property
    def metric(self) -> str:
        """What the runs are judged by."""
        return str(self.rows[0].get("metric", "accuracy"))

    @property
    def records(self) -> list[dict[str, Any]]:
        """The metrics of every round of every run, each with its settings, its seed and the run's folder."""
        found = []
        for row in self.rows:
            settings = {key: row[key] for key in self.settings}
            for seed in row["seeds"]:
                path = self.path / _label(row["method"], settings) / f"seed-{seed}"
                told = settings | {"seed": seed, "run": str(path)}
                found += [told | record for record in read_metrics(path)]
        return found

    def curves(self, metric: str = "") -> dict[str, list[tuple[int, float]]]:
        """For each row, (round, mean over seeds) of a metric; by default, of what the runs are judged by."""
        metric = metric or self.metric
        values: dict[str, dict[int, list[float]]] = {self._name(row): {} for row in self.rows}
        for record in self.records:
            if metric in record:
                values[self._name(record)].setdefault(record["round"], []).append(record[metric])
        return {
            name: [(number, statistics.fmean(found)) for number, found in sorted(by_round.items())]
            for name, by_round in values.items()
        }

    def to_dataframe(self) -> Any:
        """`records` as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise UserError("to_dataframe needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.records)

    def plot(self, metric: str = "", ax: Any = None) -> Any:
        """Draw `curves` with matplotlib; returns the axes."""
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            raise UserError("plot needs matplotlib: pip install 'dynafed[report]'") from None
        ax = ax or plt.figure().add_subplot()
        for name, points in self.curves(metric).items():
            ax.plot(*zip(*points, strict=True), label=name)
        ax.set_xlabel("round")
        ax.set_ylabel(metric or self.metric)
        ax.legend()
        return ax

    @property
    def attacked(self) -> bool:
        """Whether some of the runs had attackers."""
        return any("attack" in row for row in self.rows)

    def _name(self, row: Mapping[str, Any]) -> str:
        return _label(row["method"], {key: row[key] for key in self.settings}, escape=False)


@with_progress
def compare(
    config: Config,
    methods: Sequence[str],
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    *,
    vary: Mapping[str, Sequence[Any]] | None = None,
    callbacks: CellCallbacks = lambda title: (),
    progress: bool | None = None,
    **parts: Any,
) -> Comparison:
    """Run every method with every seed (and every combination of the values in `vary`); mean and std over seeds.

    The runs are in `out`, by default a new folder in `runs/`; with a folder of before, what is done isn't run again.
    `callbacks` gets the title of each run and returns those that follow it. `progress` and all other arguments are as
    for `run`: `model`, `train`, `test`, `clients`, ...
    """
    if unknown := sorted(parts.keys() - PARTS):
        raise UserError(f"unknown argument '{unknown[0]}': {nearest(unknown[0], PARTS)}")
    vary = vary or {}
    if taken := {"method", "seed"} & vary.keys():
        raise UserError(f"--vary {taken.pop()}=...: use --methods and --seeds for these")
    if not methods or not seeds:
        raise UserError("compare needs at least one method and one seed")
    out = Path(out) if out is not None else new_folder("compare")
    settings = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    grid = {
        _label(method, varied): {"method": method, **varied, "seeds": list(seeds)}
        for varied in settings
        for method in methods
    }
    cells = [
        Cell(
            f"{label} seed-{seed}",
            config.replace(seed=seed, **{key: row[key] for key in ("method", *vary)}),
            out / label / f"seed-{seed}",
        )
        for label, row in grid.items()
        for seed in seeds
    ]
    summaries: dict[str, dict[int, dict[str, Any]]] = {label: {} for label in grid}
    for cell, outcome in run_cells(cells, callbacks, parts=parts):
        if not isinstance(outcome, dict):
            raise outcome
        label = cell.path.parent.name
        summaries[label][cell.config.seed] = outcome
        if len(summaries[label]) == len(set(seeds)):
            grid[label] |= _over_seeds([summaries[label][seed] for seed in seeds])
            _note(out / "compare.json", grid[label], ("method", *vary))
    return Comparison(out, list(grid.values()), ("method", *vary))


def _label(method: str, varied: Mapping[str, Any], escape: bool = True) -> str:
    """The name of a row; with `escape`, of the folder with its runs."""
    label = "-".join((method, *(f"{key}={value}" for key, value in varied.items() if key != "method")))
    return label.replace(":", "_").replace("/", "_") if escape else label


def _note(file: Path, row: dict[str, Any], keys: Sequence[str]) -> None:
    """Add a row to those of earlier calls, or put it in the place of its predecessor."""
    before = json.loads(file.read_text()) if file.exists() else []
    others = [one for one in before if any(one.get(key) != row[key] for key in keys)]
    write_json(file, [*others, row])


def _over_seeds(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    metric = summaries[0].get("metric", "accuracy")
    accuracies = [summary[f"final_{metric}"] for summary in summaries]
    reached = [summary["rounds_to_target"] for summary in summaries]
    attack = summaries[0].get("attack")
    return {
        **({"attack": name_attack(attack["kind"], attack["share"])} if attack else {}),
        "metric": metric,
        f"final_{metric}": statistics.fmean(accuracies),
        "std": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
        "final_std": statistics.fmean(summary["final_std"] for summary in summaries),
        "best": statistics.fmean(summary["best"] for summary in summaries),
        "rounds_to_target": statistics.fmean(reached) if all(reached) else None,
        "seconds": statistics.fmean(summary["seconds"] for summary in summaries),
    }

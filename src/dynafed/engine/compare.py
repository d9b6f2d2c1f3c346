"""Several methods, several seeds, one table. Stopped or extended, it goes on where it was."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynafed.config import Config
from dynafed.engine.files import write_json
from dynafed.engine.grid import Cell, CellCallbacks, run_cells
from dynafed.errors import UserError


@dataclass(frozen=True)
class Comparison:
    """What `compare` leaves: a folder of runs and a row for each method and variation."""

    path: Path
    rows: list[dict[str, Any]]


def compare(
    config: Config,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: str | Path,
    *,
    vary: Mapping[str, Sequence[Any]] | None = None,
    callbacks: CellCallbacks = lambda title: (),
) -> Comparison:
    """Run every method with every seed (and every combination of the values in `vary`); mean and std over seeds.

    `callbacks` gets the title of each run and returns those that follow it.
    """
    vary = vary or {}
    if taken := {"method", "seed"} & vary.keys():
        raise UserError(f"--vary {taken.pop()}=...: use --methods and --seeds for these")
    if not methods or not seeds:
        raise UserError("compare needs at least one method and one seed")
    out, settings = Path(out), [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
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
    for cell, outcome in run_cells(cells, callbacks):
        if not isinstance(outcome, dict):
            raise outcome
        label = cell.path.parent.name
        summaries[label][cell.config.seed] = outcome
        if len(summaries[label]) == len(set(seeds)):
            grid[label] |= _over_seeds([summaries[label][seed] for seed in seeds])
            _note(out / "compare.json", grid[label], ("method", *vary))
    return Comparison(out, list(grid.values()))


def _label(method: str, varied: Mapping[str, Any]) -> str:
    """The name of the folder with the runs of all seeds."""
    label = "-".join((method, *(f"{key}={value}" for key, value in varied.items())))
    return label.replace(":", "_").replace("/", "_")


def _note(file: Path, row: dict[str, Any], keys: Sequence[str]) -> None:
    """Add a row to those of earlier calls, or put it in the place of its predecessor."""
    before = json.loads(file.read_text()) if file.exists() else []
    others = [one for one in before if any(one.get(key) != row[key] for key in keys)]
    write_json(file, [*others, row])


def _over_seeds(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    metric = summaries[0].get("metric", "accuracy")
    accuracies = [summary[f"final_{metric}"] for summary in summaries]
    reached = [summary["rounds_to_target"] for summary in summaries]
    return {
        "metric": metric,
        f"final_{metric}": statistics.fmean(accuracies),
        "std": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
        "final_std": statistics.fmean(summary["final_std"] for summary in summaries),
        "best": statistics.fmean(summary["best"] for summary in summaries),
        "rounds_to_target": statistics.fmean(reached) if all(reached) else None,
        "seconds": statistics.fmean(summary["seconds"] for summary in summaries),
    }

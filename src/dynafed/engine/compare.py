"""Several methods, several seeds, one table. Stopped or extended, it goes on where it was."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynafed.callbacks import Callback
from dynafed.config import EXECUTION_KEYS, Config
from dynafed.engine.files import write_json
from dynafed.engine.run import resume, run
from dynafed.engine.summary import read_summary
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
    callbacks: Callable[[str], Sequence[Callback]] = lambda title: (),
) -> Comparison:
    """Run every method with every seed (and every combination of the values in `vary`); mean and std over seeds.

    `callbacks` gets the title of each run and returns those that follow it.
    """
    vary = vary or {}
    if taken := {"method", "seed"} & vary.keys():
        raise UserError(f"--vary {taken.pop()}=...: use --methods and --seeds for these")
    if not methods or not seeds:
        raise UserError("compare needs at least one method and one seed")
    grid = [
        (method, dict(zip(vary, values, strict=True)))
        for values in itertools.product(*vary.values())
        for method in methods
    ]
    jobs = [[config.replace(method=method, seed=seed, **varied) for seed in seeds] for method, varied in grid]
    out = Path(out)
    rows = []
    for (method, varied), job in zip(grid, jobs, strict=True):
        label = "-".join((method, *(f"{key}={value}" for key, value in varied.items())))
        label = label.replace(":", "_").replace("/", "_")
        summaries = [_run_once(one, out / label / f"seed-{one.seed}", callbacks) for one in job]
        rows.append({"method": method, **varied, "seeds": list(seeds), **_over_seeds(summaries)})
        _note(out / "compare.json", rows[-1], ("method", *vary))
    return Comparison(out, rows)


def _note(file: Path, row: dict[str, Any], keys: Sequence[str]) -> None:
    """Add a row to those of earlier calls, or put it in the place of its predecessor."""
    before = json.loads(file.read_text()) if file.exists() else []
    others = [one for one in before if any(one.get(key) != row[key] for key in keys)]
    write_json(file, [*others, row])


def _run_once(config: Config, path: Path, callbacks: Callable[[str], Sequence[Callback]]) -> dict[str, Any]:
    """A run's summary: taken from its folder if it is done, else run or resumed."""
    title = f"{path.parent.name} {path.name}"
    if not (path / "config.toml").exists():
        return run(config, out=path, callbacks=callbacks(title)).summary
    before, wanted = Config.load(path / "config.toml").deciding(), config.deciding()
    if before != wanted:
        key = sorted(key for key in before | wanted if before.get(key) != wanted.get(key))[0]
        raise UserError(f"{path} holds a run with another {key}: choose another --out")
    summary = read_summary(path)
    changes = {key: value for key, value in config.to_dict().items() if key in EXECUTION_KEYS}
    return summary or resume(path, changes=changes, callbacks=callbacks(title)).summary


def _over_seeds(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    accuracies = [summary["final_accuracy"] for summary in summaries]
    reached = [summary["rounds_to_target"] for summary in summaries]
    return {
        "final_accuracy": statistics.fmean(accuracies),
        "std": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
        "final_std": statistics.fmean(summary["final_std"] for summary in summaries),
        "best": statistics.fmean(summary["best"] for summary in summaries),
        "rounds_to_target": statistics.fmean(reached) if all(reached) else None,
        "seconds": statistics.fmean(summary["seconds"] for summary in summaries),
    }

"""Which average stands which attack, with and without DynaFed and the running mean.

    python experiments/robustness.py runs/robustness experiments/results/robustness.json
    python experiments/robustness.py table experiments/results/robustness.json

The demo's problem (fmnist-mini, MLP, 20 clients, 8 a round) with 30 rounds. Every cell is an ordinary run folder:
stopped, the script goes on where it was. The JSON is written after each run, and what it has isn't run again. What
matters most comes first, and seed by seed. Robust averages assume that up to a quarter of the clients is wrong. The
server's check of update norms is on, as by default.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rows import L2, run_rows

from dynafed import Config
from dynafed.engine.grid import Cell
from dynafed.engine.summary import read_metrics

AVERAGES = ("fedavg", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "norm-clipping")
WITH_DYNAFED = ("fedavg", "median")
ASSUMED = 0.25
LAST = 5
BASE: dict[str, Any] = L2 | {
    "rounds": 30,
    "workers": 1,
    "dynafed.evidence": False,
    **{f"{name}.share": ASSUMED for name in ("trimmed-mean", "krum", "multi-krum")},
}
ALL = (1, 30)
TRAJECTORY = (1, 15)
DISTRUSTING = {"dynafed.outlier_steps": 4.0, "dynafed.max_matching_loss": 0.99}
STUDIES: list[tuple[float, str, float, tuple[int, int], tuple[str, ...], int]] = [
    # alpha, kind, share, rounds, averages, seed
    (0.1, "none", 0.0, ALL, AVERAGES, 0),
    (0.1, "sign-flip", 0.2, ALL, AVERAGES, 0),
    *[(0.1, kind, 0.2, ALL, AVERAGES, 0) for kind in ("little-is-enough", "label-flip", "backdoor")],
    *[(0.1, kind, 0.2, ALL, AVERAGES, 0) for kind in ("scaled", "gaussian", "stale", "huge", "nan")],
    *[(0.1, "sign-flip", share, ALL, AVERAGES, 0) for share in (0.1, 0.3)],
    (100.0, "none", 0.0, ALL, AVERAGES, 0),
    *[(100.0, kind, 0.2, ALL, AVERAGES, 0) for kind in ("sign-flip", "little-is-enough")],
    *[(0.1, "sign-flip", 0.3, rounds, ("fedavg",), 0) for rounds in ((5, 8), TRAJECTORY)],
    *[(0.1, kind, 0.2, ALL, WITH_DYNAFED, seed) for seed in (1, 2) for kind in ("none", "sign-flip")],
]
GRID = [
    # the same, but for the averages: every one of them, with and without DynaFed
    (alpha, kind, share, seed)
    for seed in (0, 1, 2)
    for alpha in (0.1, 100.0)
    for kind, share in [
        *[("sign-flip", 0.2), ("none", 0.0), ("little-is-enough", 0.2)],
        *[(kind, share) for share in (0.3, 0.1) for kind in ("sign-flip", "little-is-enough")],
    ]
]


def cells(folder: Path) -> Iterator[tuple[dict[str, Any], Cell]]:
    """Every run, with what tells it from the others."""
    for alpha, kind, share, rounds, averages, seed in STUDIES:
        for average in averages:
            variants = ["", "dynafed"] if average in WITH_DYNAFED else [""]
            for steps in [*variants, *(["distrusting dynafed"] if rounds != ALL or average == "fedavg" else [])]:
                yield cell(folder, alpha, kind, share, rounds, average, steps, seed)
    for alpha, kind, share, seed in GRID:
        for average in AVERAGES:
            for steps in ("", "dynafed"):
                yield cell(folder, alpha, kind, share, ALL, average, steps, seed)


def cell(
    folder: Path, alpha: float, kind: str, share: float, rounds: tuple[int, int], average: str, steps: str, seed: int
) -> tuple[dict[str, Any], Cell]:
    """One run, with what tells it from the others."""
    row = {"alpha": alpha, "kind": kind, "share": share, "rounds": list(rounds), "seed": seed}
    row |= {"average": average, "dynafed": steps}
    attack = {"attack.kind": kind, "attack.share": share, "attack.rounds": list(rounds)}
    methods = [average, *(["dynafed"] if steps else []), "average"]
    config = Config.load(
        "demo",
        BASE
        | (attack if share else {})
        | (DISTRUSTING if "distrusting" in steps else {})
        | {"method": "+".join(methods), "alpha": alpha, "seed": seed},
    )
    when = f"{rounds[1]}" if rounds[0] == 1 else f"{rounds[0]}-{rounds[1]}"
    name = f"{kind}-{share}-{when}-alpha-{alpha}-{average}{'+' if steps else ''}{steps}-seed-{seed}"
    return row, Cell(name, config, folder / name)


def measured(path: Path) -> dict[str, Any]:
    """Accuracies of the model and of its running mean, over the last rounds, and what the synthesis said."""
    records = read_metrics(path)
    last = records[-LAST:]
    found = {
        "model": statistics.fmean(record["accuracy_raw"] for record in last),
        "mean": statistics.fmean(record["accuracy"] for record in last),
        "rejected": sum(len(record["rejected"]) for record in records),
    }
    if "attack_success" in last[0]:
        found["attack_success"] = statistics.fmean(record["attack_success"] for record in last)
    losses = [record["matching_loss"] for record in records if "matching_loss" in record]
    refused = [record["round"] for record in records if "synthesis_refused" in record]
    return (
        found | ({"matching_loss": losses[0]} if losses else {}) | ({"refused_in_rounds": refused} if refused else {})
    )


def main(folder: Path, out: Path) -> None:
    """Run what isn't done; print and write every row as soon as it is there."""
    run_rows(cells(folder), measured, out)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The grid in Markdown: the mean over seeds, of the model / of its running mean, and how many seeds."""
    yield f"| alpha, attack, share, seeds | | {' | '.join(AVERAGES)} |"
    yield f"|{'---|' * (2 + len(AVERAGES))}"
    for alpha, kind, share in sorted({key[:3] for key in GRID}):
        for steps in ("", "dynafed"):
            wanted = {"alpha": alpha, "kind": kind, "share": share, "rounds": list(ALL), "dynafed": steps}
            found = [row for row in rows if wanted.items() <= row.items()]
            parts = [[row for row in found if row["average"] == average] for average in AVERAGES]
            seeds = {len(part) for part in parts}
            shown = [
                " / ".join(f"{100 * statistics.fmean(row[key] for row in part):.0f}" for key in ("model", "mean"))
                for part in parts
            ]
            name = f"{alpha:g}, {kind}, {share:.0%}, {'-'.join(map(str, sorted(seeds)))}" if not steps else ""
            yield f"| {name} | {'+ DynaFed' if steps else ''} | {' | '.join(shown)} |"


if __name__ == "__main__":
    if sys.argv[1] == "table":
        print(*table(json.loads(Path(sys.argv[2]).read_text())), sep="\n")
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))

"""What it gains to distrust a synthesis: attackers in some of the rounds that DynaFed records, three seeds.

    python experiments/distrust.py runs/distrust experiments/results/distrust.json
    python experiments/distrust.py table experiments/results/distrust.json
    python experiments/distrust.py honest runs/honest experiments/results/distrust-honest.json

The demo (fmnist-mini, MLP, 20 clients, 8 a round, 60 rounds, of which 15 are recorded) at alpha 0.1, with attackers
that send ten times the flipped update. Stopped, the script goes on where it was. `honest` measures how well the steps
of honest runs fit each other, at several alphas and with both optimizers.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from robustness import DISTRUSTING, measured
from rows import L2, run_rows

from dynafed import Config, tree
from dynafed.engine.grid import Cell, run_cells
from dynafed.synthesis.synthesize import mean_cosines, read_trajectory

BASE: dict[str, Any] = L2 | {"alpha": 0.1, "workers": 1, "dynafed.evidence": False}
RESTARTING = DISTRUSTING | {"dynafed.on_refusal": "restart"}
VARIANTS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg+average"},
    "dynafed": {"method": "dynafed+average"},
    "dynafed, distrusting": {"method": "dynafed+average"} | DISTRUSTING,
    "dynafed, restarting": {"method": "dynafed+average"} | RESTARTING,
    "dynafed, opposing steps out": {"method": "dynafed+average", "dynafed.opposing_steps": 0.08},
    "median+dynafed": {"method": "median+dynafed+average"},
}
FIRST = tuple(VARIANTS)[:4]
FLIP: dict[str, Any] = {"attack.kind": "sign-flip", "attack.share": 0.3}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "30 % in rounds 1 to 15": (FLIP | {"attack.rounds": [1, 15]}, (*FIRST, "median+dynafed")),
    "30 % in rounds 5 to 8": (FLIP | {"attack.rounds": [5, 8]}, (*FIRST, "dynafed, opposing steps out")),
}


def cells(folder: Path) -> Iterator[tuple[dict[str, Any], Cell]]:
    """Every run, with what tells it from the others."""
    for case, (attack, variants) in CASES.items():
        for seed in (0, 1, 2):
            for variant in variants:
                name = f"{case} {variant} {seed}".replace(", ", "-").replace(" % ", " ").replace(" ", "-")
                config = Config.load("demo", BASE | attack | VARIANTS[variant] | {"seed": seed})
                yield {"attackers": case, "variant": variant, "seed": seed}, Cell(name, config, folder / name)


def main(folder: Path, out: Path) -> None:
    """Run what isn't done; print and write every row as soon as it is there."""
    run_rows(cells(folder), measured, out)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """In Markdown: the mean over the seeds of the model / of its running mean, and the single seeds of the model."""
    yield f"| attackers | {' | '.join(VARIANTS)} |"
    yield f"|{'---|' * (1 + len(VARIANTS))}"
    for case in CASES:
        shown = []
        for variant in VARIANTS:
            found = [row for row in rows if (row["attackers"], row["variant"]) == (case, variant)]
            means = [f"{100 * statistics.fmean(row[key] for row in found):.0f}" for key in ("model", "mean") if found]
            single = ", ".join(f"{100 * row['model']:.0f}" for row in found)
            shown.append(f"{' / '.join(means)} ({single})" if found else "–")
        yield f"| {case} | {' | '.join(shown)} |"


def honest(folder: Path, out: Path) -> None:
    """Of honest trajectories: the longest step by the median one, and the lowest mean cosine with the other steps."""
    rows = []
    for seed, alpha, optimizer in itertools.product((0, 1, 2), (0.01, 0.1, 100.0), ("adam", "sgd")):
        changes = {"method": "fedavg", "rounds": 15, "workers": 1, "checkpoint_every": 1, "keep_checkpoints": 15}
        changes |= {"seed": seed, "alpha": alpha, "optimizer": optimizer, "lr": {"adam": 0.001, "sgd": 0.05}[optimizer]}
        name = f"{alpha}-{optimizer}-{seed}"
        list(run_cells([Cell(name, Config.load("demo", changes), folder / name)]))
        models = read_trajectory(folder / name)
        lengths = [tree.norm(tree.difference(after, before)) for before, after in itertools.pairwise(models)]
        row = {"seed": seed, "alpha": alpha, "optimizer": optimizer}
        row |= {"longest": max(lengths) / statistics.median(lengths), "lowest_cosine": min(mean_cosines(models))}
        rows.append(row)
        print(json.dumps(rows[-1]), flush=True)
    out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    if sys.argv[1] == "table":
        print(*table(json.loads(Path(sys.argv[2]).read_text())), sep="\n")
    elif sys.argv[1] == "honest":
        honest(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))

"""The nine methods of the paper's comparison on FashionMNIST with the MLP, beside the paper's own numbers.

    dynafed compare cpu-fmnist-mlp --seeds 0,1,2 --vary alpha=0.01,0.04 -s server_samples=600 \
        -s feddf.steps=100 -s feddf.validate=true -s fedbe.lr=1e-5 -s fedbe.lr_end=4e-6 \
        --methods fedavg,fedprox,scaffold,feddf,fedbe,abavg,fedgen,fedmix,dynafed --out runs/methods
    python experiments/methods_table.py runs/methods

The full protocol: 80 clients, 40 % a round, 200 rounds. The server's 600 samples are carved from the training split for
every method, so that all clients have the same data; only FedDF, FedBE and ABAVG look at them. FedDF's and FedBE's
settings were chosen on validation data: see docs/methods.md for what their defaults do here. Writes
experiments/results/methods-fmnist-mlp.json and prints the table: the mean accuracy on test data of the last five
rounds, which is what the paper gives, and of the last 20, each with its deviation between seeds.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from dynafed.reproduce.paper import get_experiment

LAST = 20
"""Rounds at the end that are averaged, besides the paper's five: most methods jump by 2 to 5 points."""

_NUMBERS = get_experiment("table4").numbers
PAPER = {
    method: {alpha: _NUMBERS[f"MLP, alpha {alpha}", method] for alpha in ("0.01", "0.04")}
    for method in get_experiment("table4").methods
}
"""The paper's table across architectures, column MLP: accuracy in percent and its deviation."""


def main(folder: Path) -> None:
    """Collect the comparison's rows, print them in Markdown, write them as JSON."""
    ours: dict[str, dict[str, dict[str, Any]]] = {}
    for row in json.loads((folder / "compare.json").read_text()):
        method, alpha = row["method"], str(row["alpha"])
        kept = {name: row[name] for name in ("final_accuracy", "std", "best", "seeds")}
        ours.setdefault(method, {})[alpha] = kept | last_rounds(folder / f"{method}-alpha={alpha}")
    columns = [f"alpha {alpha}, last five | last 20 | paper, last five" for alpha in ("0.01", "0.04")]
    print(f"| method | {' | '.join(columns)} |\n|---|---|---|---|---|---|---|")
    for method, paper in PAPER.items():
        cells = []
        for alpha, (mean, deviation) in paper.items():
            found = ours.get(method, {}).get(alpha)
            for key, std in (("final_accuracy", "std"), ("late", "late_std")):
                cells.append(f"{100 * found[key]:.1f} ± {100 * found[std]:.1f}" if found else "not run")
            cells.append(f"{mean:.1f} ± {deviation:.1f}")
        print(f"| {method} | {' | '.join(cells)} |")
    out = Path(__file__).parent / "results" / "methods-fmnist-mlp.json"
    out.write_text(json.dumps(ours, indent=1) + "\n")


def last_rounds(folder: Path) -> dict[str, Any]:
    """The mean accuracy of the last rounds over all seeds, its deviation between seeds, and that between rounds."""
    runs = []
    for file in sorted(folder.glob("seed-*/metrics.jsonl")):
        accuracies = [json.loads(line)["accuracy"] for line in file.read_text().splitlines()]
        runs.append(accuracies[-LAST:])
    means = [statistics.fmean(run) for run in runs]
    return {
        "late": statistics.fmean(means),
        "late_std": statistics.stdev(means),
        "rounds_std": statistics.fmean(map(statistics.stdev, runs)),
        "late_by_seed": means,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))

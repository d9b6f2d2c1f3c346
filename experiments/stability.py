"""How high, how soon and how steadily the methods of a comparison end.

    dynafed compare cpu-fmnist-mlp --methods fedavg,dynafed --seeds 0,1,2 --out runs/fmnist-mlp
    python experiments/stability.py runs/fmnist-mlp experiments/results/fmnist-mlp.json

For every method and seed: the mean accuracy of the last five rounds, the first round that reaches the final accuracy of
FedAvg with the same seed, and the standard deviation from round to round over the last twenty.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path


def main(folder: Path, out: Path) -> None:
    """Read the runs' metrics, print the table, write it as JSON."""
    curves: dict[str, dict[int, list[float]]] = {}
    for file in sorted(folder.glob("*/seed-*/metrics.jsonl")):
        accuracies = [json.loads(line)["accuracy"] for line in file.read_text().splitlines()]
        curves.setdefault(file.parents[1].name, {})[int(file.parent.name.removeprefix("seed-"))] = accuracies
    rows = {}
    for method, seeds in curves.items():
        rows[method] = {
            str(seed): {
                "final_accuracy": statistics.fmean(curve[-5:]),
                "last_20_mean": statistics.fmean(curve[-20:]),
                "last_20_std": statistics.stdev(curve[-20:]),
                "reaches_fedavg_in_round": next(
                    (r for r, a in enumerate(curve, 1) if a >= statistics.fmean(curves["fedavg"][seed][-5:])), None
                ),
                "rounds": len(curve),
            }
            for seed, curve in seeds.items()
        }
        finals = [row["final_accuracy"] for row in rows[method].values()]
        spread = statistics.fmean(row["last_20_std"] or 0 for row in rows[method].values())
        reached = [row["reaches_fedavg_in_round"] for row in rows[method].values()]
        print(
            f"{method:12} final {100 * statistics.fmean(finals):.2f} ± {100 * statistics.stdev(finals):.2f} %, "
            f"round to round {100 * spread:.2f} points, reaches FedAvg's final accuracy in rounds {reached}"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

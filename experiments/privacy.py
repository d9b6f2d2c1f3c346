"""Accuracy against epsilon: FedAvg, DynaFed, and the running mean of each.

    python experiments/privacy.py runs/privacy experiments/results/privacy.json

Differential privacy for each client needs many clients: fmnist-mini on 1000 clients with 10 samples each, 200 a round,
25 rounds, an MLP of width 16, alpha 0.1, one seed; and, for comparison, the demo's 20 clients. delta is 1e-5.
Stopped, the script goes on where it was.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rows import L2

from dynafed import Config
from dynafed.engine.grid import Cell, run_cells
from dynafed.engine.summary import read_metrics

LAST = 5
COMMON: dict[str, Any] = L2 | {"rounds": 25, "alpha": 0.1, "workers": 1, "dynafed.evidence": False}
PROBLEMS: dict[str, dict[str, Any]] = {
    "1000 clients": {"clients": 1000, "clients_per_round": 200, "local_epochs": 3, "batch_size": 10, "mlp.width": 16},
    "20 clients": {},
}
CLIP = {"1000 clients": 0.5, "20 clients": 1.0}
EPSILONS = {"1000 clients": (0.0, 32.0, 8.0, 2.0), "20 clients": (0.0, 100.0, 8.0)}


def cells(folder: Path) -> Iterator[tuple[dict[str, Any], Cell]]:
    """Every run, with what tells it from the others."""
    for problem, changes in PROBLEMS.items():
        for epsilon in EPSILONS[problem]:
            for method in ("fedavg", "dynafed"):
                private = {"dp.epsilon": epsilon, "dp.clip": CLIP[problem]} if epsilon else {}
                config = Config.load("demo", COMMON | changes | private | {"method": f"{method}+average"})
                name = f"{problem}-{epsilon}-{method}".replace(" ", "-")
                yield (
                    {"problem": problem, "epsilon": epsilon or None, "method": method},
                    Cell(name, config, folder / name),
                )


def main(folder: Path, out: Path) -> None:
    """Run what isn't done; print and write every row as soon as it is there."""
    planned = {cell.path: row for row, cell in cells(folder)}
    rows = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for cell, summary in run_cells([cell for _, cell in cells(folder)]):
        assert isinstance(summary, dict)
        last = read_metrics(cell.path)[-LAST:]
        rows.append(
            planned[cell.path]
            | {"spent": summary.get("epsilon")}
            | {"model": statistics.fmean(record["accuracy_raw"] for record in last)}
            | {"mean": statistics.fmean(record["accuracy"] for record in last)}
        )
        print(json.dumps(rows[-1]), flush=True)
        out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Smaller updates: bytes and accuracy of FedAvg and DynaFed with each transform, three seeds.

    python experiments/compression.py runs/compression experiments/results/compression.json
    python experiments/compression.py table experiments/results/compression.json

The demo's problem with 30 rounds at alpha 0.1. Stopped, the script goes on where it was.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from robustness import measured
from rows import L2, run_rows

from dynafed import Config
from dynafed.engine.grid import Cell
from dynafed.engine.summary import read_metrics

METHODS = ("fedavg", "dynafed")
TRANSFORMS: dict[str, list[str]] = {"whole updates": [], "`8-bit`": ["8-bit"], "`top-k`": ["top-k"]}
SEEDS = (0, 1, 2)


def cells(folder: Path) -> Iterator[tuple[dict[str, Any], Cell]]:
    """Every run, with what tells it from the others."""
    for seed in SEEDS:
        for method in METHODS:
            for sent, transforms in TRANSFORMS.items():
                changes = {"rounds": 30, "alpha": 0.1, "workers": 1, "dynafed.evidence": False, "seed": seed}
                changes |= L2 | {"method": f"{method}+average", "update_transforms": transforms}
                name = "-".join([method, *(transforms or ["whole"]), str(seed)])
                row = {"method": method, "sent": sent, "seed": seed}
                yield row, Cell(name, Config.load("demo", changes), folder / name)


def with_bytes(path: Path) -> dict[str, Any]:
    """What is measured of every run, and what its clients sent."""
    return {"megabytes_up": sum(record["bytes_up"] for record in read_metrics(path)) / 1e6} | measured(path)


def main(folder: Path, out: Path) -> None:
    """Run what isn't done; print and write every row as soon as it is there."""
    run_rows(cells(folder), with_bytes, out)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """In Markdown: megabytes, and accuracies as mean ± deviation over the seeds."""
    columns = [(method, key) for method in METHODS for key in ("model", "mean")]
    named = {"model": "", "mean": ", running mean"}
    yield f"| | MB up | {' | '.join(f'{method}{named[key]}' for method, key in columns)} |"
    yield f"|{'---|' * (2 + len(columns))}"
    for sent in TRANSFORMS:
        cells = []
        for method, key in columns:
            found = [100 * row[key] for row in rows if (row["method"], row["sent"]) == (method, sent)]
            cells.append(f"{statistics.fmean(found):.1f} ± {statistics.stdev(found):.1f}")
        size = statistics.fmean(row["megabytes_up"] for row in rows if row["sent"] == sent)
        yield f"| {sent} | {size:.1f} | {' | '.join(cells)} |"


if __name__ == "__main__":
    if sys.argv[1] == "table":
        print(*table(json.loads(Path(sys.argv[2]).read_text())), sep="\n")
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))

"""The grid behind docs/guide.md: which method, with and without the mean, for which clients.

    DYNAFED_DATA=... python experiments/grid.py runs/grid experiments/results/grid.json [WORD]
    python experiments/grid.py table experiments/results/grid.json
    python experiments/grid.py plot experiments/results/grid.json docs/grid.png

The paper's protocol (80 clients, 200 rounds, one local epoch) on FashionMNIST and CIFAR-10, MLP and ConvNet of width
16, Adam at 1e-3 and SGD at 0.05 on the clients, 40 and 10 % of them a round, three alphas, seed 0, test data. Every run
ends in `+average`, so that it has two numbers: the model's, and the mean's of its last 20 models; both as the mean of
the last five rounds, and of the last 20. What is in the JSON isn't run again, and what matters most comes first. With a
word, only cells that have it in their names are run, such as "fmnist-mlp".
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from rows import run_rows

from dynafed import Config
from dynafed.engine.grid import Cell
from dynafed.engine.summary import read_metrics

METHODS = ("fedavg", "dynafed", "fedprox", "fedprox+dynafed")
PROBLEMS = {
    ("fmnist", "mlp"): "cpu-fmnist-mlp",
    ("cifar10", "convnet"): "cpu-cifar10",
    ("fmnist", "convnet"): "cpu-fmnist-convnet",
    ("cifar10", "mlp"): "cpu-fmnist-mlp",
}
OPTIMIZERS = {"adam": {}, "sgd": {"optimizer": "sgd", "lr": 0.05}}
SETTINGS = [
    *product(PROBLEMS, ("adam",), (0.4,), (0.01, 0.16, 0.04)),
    *product(PROBLEMS, ("sgd",), (0.4,), (0.01, 0.16)),
    *product(PROBLEMS, ("adam", "sgd"), (0.1,), (0.01, 0.16)),
    *product(PROBLEMS, ("sgd",), (0.4, 0.1), (0.04,)),
    *product(PROBLEMS, ("adam",), (0.1,), (0.04,)),
]


def cells(folder: Path) -> Iterator[tuple[dict[str, Any], Cell]]:
    """Every run, with what tells it from the others."""
    for (problem, optimizer, participation, alpha), method in product(SETTINGS, METHODS):
        dataset, model = problem
        row = {"dataset": dataset, "model": model, "optimizer": optimizer, "participation": participation}
        row |= {"alpha": alpha, "method": method}
        changes = {"dataset": dataset, "alpha": alpha, "participation": participation, "method": f"{method}+average"}
        config = Config.load(PROBLEMS[problem], OPTIMIZERS[optimizer] | changes | {"workers": 1})
        name = f"{dataset}-{model}-{optimizer}-{participation}-alpha{alpha}-{method}"
        yield row, Cell(name, config, folder / name)


def measured(path: Path) -> dict[str, Any]:
    """Accuracies of the model and of the mean, over the last five rounds and the last 20; and the matching loss."""
    records = read_metrics(path)
    found = {
        f"{name}{suffix}": round(statistics.fmean(record[key] for record in records[-last:]), 5)
        for name, key in (("raw", "accuracy_raw"), ("mean", "accuracy"))
        for last, suffix in ((5, ""), (20, "_last_20"))
    }
    losses = [round(record["matching_loss"], 4) for record in records if "matching_loss" in record]
    return found | {"rounds": len(records), "matching_loss": losses[0] if losses else None}


def main(folder: Path, out: Path, word: str = "") -> None:
    """Run what isn't done; print and write every row as soon as it is there."""
    run_rows(((row, cell) for row, cell in cells(folder) if word in cell.title), measured, out)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The grid in Markdown: accuracy of the model / of the mean, in percent; a dash where nothing was run."""
    yield f"| clients' data and network | optimizer, clients a round | alpha | {' | '.join(METHODS)} |"
    yield f"|{'---|' * (3 + len(METHODS))}"
    for (dataset, model), optimizer, participation, alpha in sorted(SETTINGS):
        wanted = {"dataset": dataset, "model": model, "optimizer": optimizer, "participation": participation}
        found = {row["method"]: row for row in rows if (wanted | {"alpha": alpha}).items() <= row.items()}
        if found:
            shown = (
                f"{100 * found[method]['raw']:.1f} / {100 * found[method]['mean']:.1f}" if method in found else "-"
                for method in METHODS
            )
            yield f"| {dataset}, {model} | {optimizer}, {participation:.0%} | {alpha} | {' | '.join(shown)} |"


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """The grid as a picture: a panel for each dataset and network, a column for each kind of clients."""
    import matplotlib.pyplot as plt

    problems = sorted({(row["dataset"], row["model"]) for row in rows})
    figure, panels = plt.subplots(len(problems), 1, figsize=(10, 3.4 * len(problems)), squeeze=False, layout="tight")
    for panel, (dataset, model) in zip(panels[:, 0], problems, strict=True):
        here = [row for row in rows if (row["dataset"], row["model"]) == (dataset, model)]
        places = sorted({(row["optimizer"], -row["participation"], row["alpha"]) for row in here})
        for number, method in enumerate(METHODS):
            found = [row for row in here if row["method"] == method]
            x = [
                places.index((row["optimizer"], -row["participation"], row["alpha"])) + 0.16 * (number - 1.5)
                for row in found
            ]
            panel.vlines(x, [100 * row["raw"] for row in found], [100 * row["mean"] for row in found], f"C{number}")
            panel.plot(x, [100 * row["raw"] for row in found], "o", color=f"C{number}", mfc="white")
            panel.plot(x, [100 * row["mean"] for row in found], "o", color=f"C{number}", label=method)
        labels = [f"{optimizer}, {-share:.0%}\nalpha {alpha}" for optimizer, share, alpha in places]
        panel.set_xticks(range(len(places)), labels, fontsize=8)
        panel.set_title(f"{dataset}, {model}: the model (white), the mean of its last 20 (filled)", fontsize=10)
        panel.set_ylabel("test accuracy, %")
        panel.grid(axis="y", alpha=0.3)
    panels[0, 0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    if sys.argv[1] == "plot":
        plot(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
    elif sys.argv[1] == "table":
        print(*table(json.loads(Path(sys.argv[2]).read_text())), sep="\n")
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])

"""The curves of the paper's first figure, drawn from the stored cells.

    python experiments/figures.py docs/reproduce-curves.png

A panel for each dataset, network and alpha of which `experiments/results/reproduce-*.jsonl` has cells of the paper's
protocol, with a ConvNet of width 32 or the MLP; a curve for each method, the mean over its seeds and five rounds;
dashed, the mean of FedAvg's last 20 models.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

RESULTS = Path(__file__).parent / "results"
NAMES = {"fmnist": "FashionMNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
METHODS = ("fedavg", "fedprox", "scaffold", "feddf", "fedbe", "abavg", "fedgen", "fedmix", "dynafed")
SMOOTH = 5
PLAIN = {"local_epochs": 1, "participation": 0.4, "optimizer": "adam", "client_state": "fresh", "rounds": 200}
PLAIN |= {"partition": "dirichlet-balanced"}


def stored() -> Iterator[dict[str, Any]]:
    """The finished cells of the paper's protocol, each once."""
    seen = set()
    for file in sorted(RESULTS.glob("reproduce-*.jsonl")):
        for record in map(json.loads, file.read_text().splitlines()):
            config = record["config"]
            usual = config["model"] == "mlp" or config["convnet"]["width"] == 32
            usual = usual and config.get("dynafed", {}).get("distance") != "l2"
            if record["done"] and record["digest"] not in seen and usual and PLAIN.items() <= config.items():
                seen.add(record["digest"])
                yield record


def curve(records: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds and accuracy in percent, the mean over the runs, smoothed."""
    runs = np.array([[value for _, value in record[key]] for record in records])
    window = np.ones(SMOOTH) / SMOOTH
    return np.arange(SMOOTH, runs.shape[1] + 1), 100 * np.convolve(runs.mean(0), window, "valid")


def main(file: str) -> None:
    """Draw them."""
    panels: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for record in stored():
        config = record["config"]
        panels.setdefault((config["dataset"], config["model"], config["alpha"]), []).append(record)
    columns = 3
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, ((dataset, model, alpha), records) in zip(axes.flat, sorted(panels.items()), strict=False):
        for place, method in enumerate(METHODS):
            found = [record for record in records if record["method"] == method]
            if found:
                wide = method in ("fedavg", "dynafed")
                axis.plot(*curve(found, "curve"), color=f"C{place}", lw=1.8 if wide else 0.8, label=method)
            if found and method == "fedavg":
                label = "fedavg, mean of the last 20"
                axis.plot(*curve(found, "mean_curve"), "--", color="C0", lw=1.4, label=label)
        network = "MLP" if model == "mlp" else "ConvNet, width 32"
        axis.set_title(f"{NAMES[dataset]}, {network}, alpha {alpha:g}", fontsize=9)
        axis.set_xlabel("round", fontsize=8)
        axis.set_ylabel("test accuracy, %", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=max(axis.get_ylim()[0], axis.get_ylim()[1] - 45))
    named = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Does the quotient distance, and a rate for each tensor, help the matching and what D_syn teaches?

    DYNAFED_DATA=... python experiments/matching.py cpu-fmnist-convnet [iterations [variant ...]]
    DYNAFED_DATA=... python experiments/matching.py cpu-fmnist-mlp [iterations [variant ...]]

writes experiments/results/matching-<preset>.json, a row for each variant and seed of the synthesis; rows that are there
are not run again. The trajectory and the measure are those of experiments/ablation.py: D_syn is made from the first 20
rounds of one FedAvg run; the global models of the rounds 21 to 40 are fine-tuned once on it; accuracy is on validation
samples. Beside it: the accuracy of plain means of checkpoints, and how much of the squared way from a checkpoint to the
mean of the next five lies in directions that the predictions don't depend on.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from typing import Any

import torch
from ablation import RECORDED, mean, prepare

from dynafed import Config, tree
from dynafed.engine.evaluation import evaluate
from dynafed.engine.federation import Federation
from dynafed.synthesis import DynaFedSettings, finetune, synthesize
from dynafed.synthesis.invariances import find_invariances
from dynafed.synthesis.quality import matching_by_segment
from dynafed.synthesis.synthesize import Segments
from dynafed.tree import Tree

SEEDS = (0, 1, 2)
QUOTIENT = {"distance": "quotient", "inner_rates": "single"}
TENSOR = {"distance": "quotient", "inner_rates": "tensor"}
AHEAD = {"segment": 10, "targets": [5], "target_draw": "tail"}
VARIANTS: dict[str, dict[str, Any]] = {
    "l2": {"distance": "l2"},
    "quotient": QUOTIENT,
    "quotient, rates per tensor": TENSOR,
    "quotient, rates per tensor, segments of 10, mean of the last 5": TENSOR | AHEAD,
    "quotient, segments of 10, mean of the last 5": QUOTIENT | AHEAD,
    "l2, rates per tensor": {"distance": "l2", "inner_rates": "tensor"},
    "quotient, rates per tensor, learned at 0.03": TENSOR | {"inner_lr_rate": 0.03},
    "quotient, rates per tensor, from 0.1": TENSOR | {"inner_lr": 0.1},
    "quotient, from 0.1": QUOTIENT | {"inner_lr": 0.1},
    "quotient, scaled rates": TENSOR | {"inner_rates": "scaled"},
    "quotient, scaled rates, learned at 0.03": TENSOR | {"inner_rates": "scaled", "inner_lr_rate": 0.03},
}
MEANS = {"1 to 20": (0, 20), "11 to 20": (10, 20), "16 to 20": (15, 20), "11 to 30": (10, 30), "21 to 40": (20, 40)}


def baselines(federation: Federation, models: list[Tree]) -> dict[str, Any]:
    """What needs no synthesis: accuracy of single models and of means, and the shares of the squared way."""
    trained = [name for name, parameter in federation.problem.model.named_parameters() if parameter.requires_grad]
    steps = [tree.only(tree.map_tensors(torch.sub, mean(models[n + 1 : n + 6]), models[n]), trained) for n in range(15)]
    single = [evaluate(federation, model)["accuracy"] for model in models[RECORDED:]]
    return {
        "before": statistics.fmean(single),
        "before_std": statistics.stdev(single),
        "means": {
            name: evaluate(federation, mean(models[first:last]))["accuracy"] for name, (first, last) in MEANS.items()
        },
        "invariant_shares": _average(
            [find_invariances(federation.problem.model, federation.schema.shape).shares(step) for step in steps]
        ),
        "radial_shares": _average([radial(step, model) for step, model in zip(steps, models, strict=False)]),
    }


def radial(step: Tree, model: Tree) -> dict[str, float]:
    """For each weight, the share of the squared way along the rows themselves: a change of their lengths."""
    total = sum(float(tensor.square().sum()) for tensor in step.values())
    shares = {}
    for name, tensor in step.items():
        if tensor.ndim > 1:
            rows, change = model[name].flatten(1), tensor.flatten(1)
            shares[name] = float(((rows * change).sum(1).square() / rows.square().sum(1)).sum()) / total
    return shares


def _average(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def main(preset: str, iterations: str = "0", *variants: str) -> None:
    """Run what is missing."""
    federation, models, file, rows = prepare(preset, "matching")
    network, seeds = federation.problem.model, federation.problem.seeds
    shape, classes = federation.schema.shape, federation.schema.classes
    invariances = find_invariances(network, shape)

    def write(key: str, row: dict[str, Any]) -> None:
        rows[key] = row
        file.write_text(json.dumps(rows, indent=1) + "\n")
        print(key, json.dumps(row), flush=True)

    if "baselines" not in rows:
        write("baselines", baselines(federation, models))
    for seed, name in itertools.product(SEEDS, variants or VARIANTS):
        length = {"iterations": int(iterations)} if int(iterations) else {}
        settings = Config.load(preset, {f"dynafed.{k}": v for k, v in (length | VARIANTS[name]).items()}).section(
            "dynafed", DynaFedSettings
        )
        key = f"{name}; {settings.iterations} iterations; seed {seed}"
        if key in rows:
            continue
        losses: list[float] = []
        began = time.perf_counter()
        synthetic = synthesize(
            network,
            models[:RECORDED],
            shape,
            classes,
            settings,
            seed,
            on_iteration=lambda iteration, loss, x, losses=losses: losses.append(loss),
        )
        seconds = time.perf_counter() - began
        after = [
            evaluate(federation, finetune(network, model, synthetic, settings, seeds, 1))["accuracy"]
            for model in models[RECORDED:]
        ]
        by_segment = {
            kind: statistics.fmean(
                matching_by_segment(
                    network,
                    Segments(models[:RECORDED], settings, seeds, known),
                    synthetic,
                ).values()
            )
            for kind, known in (("l2", None), ("quotient", invariances))
        }
        rates = synthetic.inner_rates
        write(
            key,
            {
                "after": statistics.fmean(after),
                "after_std": statistics.stdev(after),
                "training_loss": statistics.fmean(losses[-50:]),
                "matching_loss_to_the_last_checkpoint": by_segment,
                "inner_lr": synthetic.inner_lr,
                "inner_rates": None if rates is None else [float(f"{rate:.3g}") for rate in rates],
                "seconds": round(seconds),
            },
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

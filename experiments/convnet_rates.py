"""Which settings of the synthesis suit a ConvNet of some width: distance, the rates' start and learning, samples' rate.

    DYNAFED_DATA=... python experiments/convnet_rates.py cpu-fmnist-convnet 32 150 0,1,2 [KEY=VALUE ...] [VARIANT ...]

writes experiments/results/convnet-rates-<preset>-<width>.json (`KEY=VALUE` changes the config and the name, such as
`alpha=0.16`), a row for each variant and seed of the synthesis (none
in the name: 0); rows that are there are not run again. FedAvg runs for 40 rounds at the preset's protocol, seed 0, on
validation data; D_syn is made from rounds 1 to 20. The models of rounds 21, 25, ... 37 are then fine-tuned once on it,
with several budgets. Beside it, the matching loss over the iterations.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from served_mean import LENGTH, Study

from dynafed.engine.evaluation import evaluate
from dynafed.synthesis import finetune, synthesize

TENSOR = {"distance": "quotient", "inner_rates": "tensor"}
HEADLINE = TENSOR | {"inner_lr": 0.03, "inner_lr_rate": 0.03, "image_lr": 0.1, "targets": [2]}
AHEAD = {"segment": 10, "targets": [5], "target_draw": "tail"}
VARIANTS: dict[str, dict[str, Any]] = {
    "l2": {"distance": "l2", "image_lr": 0.03, "targets": [5]},
    "headline": HEADLINE,
    "scaled": HEADLINE | {"inner_rates": "scaled", "inner_lr": 0.0},
    "scaled, image rate 0.03": HEADLINE | {"inner_rates": "scaled", "inner_lr": 0.0, "image_lr": 0.03},
    "scaled, targets of 5": HEADLINE | {"inner_rates": "scaled", "inner_lr": 0.0, "targets": [5]},
    "headline, targets of 5": HEADLINE | {"targets": [5]},
    "headline, image rate 0.03": HEADLINE | {"image_lr": 0.03},
    "headline, from 0.1": HEADLINE | {"inner_lr": 0.1},
    "headline, 20 inner steps": HEADLINE | {"inner_steps": 20},
    "headline, 150 samples": HEADLINE | {"samples": 150},
    "headline, segments of 10, mean of the last 5": HEADLINE | AHEAD,
    "scaled, segments of 10, mean of the last 5": HEADLINE | AHEAD | {"inner_rates": "scaled", "inner_lr": 0.0},
}
BUDGETS = {"20 steps at 1e-4": (20, 1e-4), "50 steps at 1e-4": (50, 1e-4), "50 steps at 3e-4": (50, 3e-4)}
ROUNDS = range(21, 40, 4)


def measure(study: Study, changes: dict[str, Any], seed: int) -> dict[str, Any]:
    """One variant's row."""
    problem, schema, losses = study.federation.problem, study.federation.schema, []
    settings = replace(study.settings, **changes)
    began = time.perf_counter()
    synthetic = synthesize(
        problem.model,
        study.models[:LENGTH],
        schema.shape,
        schema.classes,
        settings,
        seed,
        on_iteration=lambda iteration, loss, x: losses.append(loss),
    )
    row: dict[str, Any] = {"seconds": round(time.perf_counter() - began)}
    row["matching_loss"] = [round(statistics.fmean(losses[at : at + 20]), 3) for at in range(1, len(losses), 20)]
    rates = synthetic.inner_rates
    row["inner_rates"] = [float(f"{rate:.3g}") for rate in ([synthetic.inner_lr] if rates is None else rates)]
    for name, (steps, lr) in BUDGETS.items():
        budget = replace(settings, finetune_steps=steps, finetune_lr=lr)
        tuned = [finetune(problem.model, study.models[n - 1], synthetic, budget, problem.seeds, n) for n in ROUNDS]
        row[name] = round(statistics.fmean(evaluate(study.federation, model)["accuracy"] for model in tuned), 4)
    return row


def main(preset: str, width: str, iterations: str, seeds: str, *names: str) -> None:
    """Run what is missing."""
    changes = dict(name.split("=", 1) for name in names if "=" in name)
    names = tuple(name for name in names if "=" not in name)
    suffix = "".join(f"-{key}-{value}" for key, value in changes.items()).replace(chr(34), "")
    file = Path(__file__).parent / "results" / f"convnet-rates-{preset}-{width}{suffix}.json"
    rows = json.loads(file.read_text()) if file.exists() else {}
    torch.set_num_threads(1)
    typed = tomllib.loads("".join(f"{key} = {value}\n" for key, value in changes.items()))
    study = Study(preset, 0, f"width-{width}{suffix}", **typed, **{"convnet.width": int(width), "rounds": 40})
    if "as they are" not in rows:
        rows["as they are"] = {
            name: round(statistics.fmean(evaluate(study.federation, models[n - 1])["accuracy"] for n in ROUNDS), 4)
            for name, models in (("model", study.models), ("mean of 20", study.means))
        }
        print(json.dumps(rows["as they are"]), flush=True)
    for seed, name in itertools.product(map(int, seeds.split(",")), names or VARIANTS):
        key = f"{name}; {iterations} iterations" + (f"; seed {seed}" if seed else "")
        if key not in rows:
            rows[key] = measure(study, VARIANTS[name] | {"iterations": int(iterations)}, seed)
            print(key, json.dumps(rows[key]), flush=True)
            file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

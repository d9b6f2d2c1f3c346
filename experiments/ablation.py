"""Which choices of the synthesis matter: one changed at a time, on one trajectory.

    DYNAFED_DATA=... python experiments/ablation.py        writes experiments/results/ablation.json, a row at a time

FashionMNIST, the paper's MLP and protocol at alpha 0.01, seed 0. FedAvg runs for 40 rounds; D_syn is made from the
first 20; then the global model of each of the rounds 21 to 40 is fine-tuned once on D_syn. The accuracy is that on
5,000 validation samples carved from the training split, before and after. Rows that are there are not run again.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from dynafed import Config
from dynafed.engine.checkpoint import RunState
from dynafed.engine.evaluate import accuracy
from dynafed.engine.plan import Plan
from dynafed.engine.run import one_round
from dynafed.engine.workers import Workers
from dynafed.methods import Host
from dynafed.settings import build
from dynafed.synthesis import DynaFedSettings, finetune, synthesize
from dynafed.tree import Tree

FILE = Path(__file__).parent / "results" / "ablation.json"
BASE: dict[str, Any] = {"iterations": 600, "image_lr": 0.01, "finetune_lr": 3e-4, "finetune_steps": 50}
VARIANTS: dict[str, dict[str, Any]] = {
    "as in cpu-fmnist-mlp": {},
    "300 iterations": {"iterations": 300},
    "1000 iterations": {"iterations": 1000},
    "inner rate fixed at 0.3": {"inner_lr": 0.3, "inner_lr_rate": 0.0},
    "inner rate 0.004, as the released code's 0.04 / C": {"inner_lr": 0.004, "inner_lr_rate": 0.0},
    "inner rate 1e-5, as in the paper's text": {"inner_lr": 1e-5, "inner_lr_rate": 0.0},
    "labels not learned": {"learn_labels": False},
    "label rate 0.01, as in the released code": {"label_lr": 0.01},
    "image rate 0.05, as in the paper": {"image_lr": 0.05},
    "image rate 0.1": {"image_lr": 0.1},
    "image rate 0.003": {"image_lr": 0.003},
    "target: mean of all five": {"targets": [5]},
    "target: the segment's last checkpoint": {"target_draw": "last"},
    "segment of 10": {"segment": 10, "targets": [5]},
    "40 inner steps": {"inner_steps": 40},
    "cosine distance": {"distance": "cosine"},
    "300 samples": {"samples": 300},
    "augmentation": {"augment": True},
    "fine-tuning: 20 steps at 1e-4": {"finetune_lr": 1e-4, "finetune_steps": 20},
    "fine-tuning: 100 steps at 1e-4": {"finetune_lr": 1e-4, "finetune_steps": 100},
    "fine-tuning: 20 steps at 1e-3": {"finetune_lr": 1e-3, "finetune_steps": 20},
}


def trajectory(plan: Plan, rounds: int) -> list[Tree]:
    """The global model after each round of FedAvg."""
    path = []
    with tempfile.TemporaryDirectory() as folder, Workers(plan) as workers:
        state = RunState.initial(plan, Path(folder))
        for _ in range(rounds):
            state, _ = one_round(plan, state, workers, Host())
            path.append(state.model)
    return path


def main() -> None:
    """Run what is missing."""
    config = Config.load("cpu-fmnist-mlp", {"method": "fedavg", "validation_samples": 5000, "evaluate": "validation"})
    plan = Plan.make(config)
    torch.set_num_threads(1)
    path = trajectory(plan, 40)
    rows = json.loads(FILE.read_text()) if FILE.exists() else {}
    before = [accuracy(plan, model) for model in path[20:]]
    made: dict[str, Any] = {}
    for name, changes in VARIANTS.items():
        if name in rows:
            continue
        settings = build(DynaFedSettings, BASE | changes)
        losses: list[float] = []
        key = json.dumps({k: v for k, v in changes.items() if not k.startswith("finetune")})
        if key not in made:
            synthetic = synthesize(
                plan.module,
                path[:20],
                plan.dataset.shape,
                plan.dataset.classes,
                settings,
                seen=lambda iteration, loss, x, losses=losses: losses.append(loss),
            )
            made[key] = synthetic, statistics.fmean(losses[-50:])
        synthetic, loss = made[key]
        after = [
            accuracy(plan, finetune(plan.module, model, synthetic, settings, plan.seeds, 1)) for model in path[20:]
        ]
        rows[name] = {
            "before": statistics.fmean(before),
            "before_std": statistics.stdev(before),
            "after": statistics.fmean(after),
            "after_std": statistics.stdev(after),
            "matching_loss": loss,
            "inner_lr": synthetic.inner_lr,
        }
        print(f"{name:50} {statistics.fmean(before):.4f} -> {statistics.fmean(after):.4f}", flush=True)
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

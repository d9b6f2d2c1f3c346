"""Which choices of the synthesis matter: one changed at a time, on one trajectory.

    DYNAFED_DATA=... python experiments/ablation.py cpu-fmnist-mlp
    DYNAFED_DATA=... python experiments/ablation.py cpu-fmnist-convnet

writes experiments/results/ablation-<preset>.json, a row at a time. FedAvg runs for 40 rounds at the preset's protocol,
seed 0 (the run is kept in runs/); D_syn is made from the first 20; then the global model of each of the rounds 21 to 40
is fine-tuned once on D_syn. The accuracy is that on 5,000 validation samples carved from the training split, before
and after. Rows that are there are not run again. All have the paper's distance and a single inner rate; for what these
two change, see matching.py and whole_runs.py.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dynafed import Config, resume, run, tree
from dynafed.engine.evaluation import evaluate
from dynafed.engine.federation import Federation
from dynafed.synthesis import DynaFedSettings, finetune, synthesize
from dynafed.tree import Tree

ROUNDS, RECORDED = 40, 20
BASE = {"distance": "l2", "inner_rates": "single"}
MLP: dict[str, dict[str, Any]] = {
    "as in the preset": {},
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
CONVNET: dict[str, dict[str, Any]] = {
    "as in the preset": {},
    "fine-tuning: 50 steps at 1e-3": {"finetune_lr": 1e-3},
    "300 iterations": {"iterations": 300},
    "target: mean of two": {"targets": [2]},
    "segment of 10": {"segment": 10},
    "image rate 0.01": {"image_lr": 0.01},
    "image rate 0.1": {"image_lr": 0.1},
    "label rate 0.1": {"label_lr": 0.1},
    "20 inner steps": {"inner_steps": 20},
    "augmentation": {"augment": True},
}
VARIANTS = {"cpu-fmnist-mlp": MLP, "cpu-fmnist-convnet": CONVNET}


def trajectory(config: Config, folder: Path) -> list[Tree]:
    """The global model after each round of FedAvg, from a run that is made or finished if need be."""
    resume(folder) if (folder / "config.toml").exists() else run(config, out=folder)
    files = sorted(folder.glob("checkpoint/round-*/state.safetensors"))
    return [tree.unnest(tree.unpack(file.read_bytes()))["model"] for file in files]


def mean(models: list[Tree]) -> Tree:
    """The mean of several models."""
    return tree.map_tensors(lambda *tensors: torch.stack(tensors).mean(dim=0), *models)


def prepare(preset: str, kind: str) -> tuple[Federation, list[Tree], Path, dict[str, Any]]:
    """The federation, its FedAvg models on validation data, the file of the results, and those that are there."""
    validated = {"method": "fedavg", "validation_samples": 5000, "evaluate": "validation", "rounds": ROUNDS}
    config = Config.load(preset, validated | {"checkpoint_every": 1, "keep_checkpoints": ROUNDS})
    models = trajectory(config, Path("runs") / f"ablation-{preset}")
    file = Path(__file__).parent / "results" / f"{kind}-{preset}.json"
    torch.set_num_threads(1)
    return Federation.create(config), models, file, json.loads(file.read_text()) if file.exists() else {}


def main(preset: str) -> None:
    """Run what is missing."""
    federation, path, file, rows = prepare(preset, "ablation")
    network, seeds = federation.problem.model, federation.problem.seeds
    before = [evaluate(federation, model)["accuracy"] for model in path[RECORDED:]]
    made: dict[str, Any] = {}
    for name, changes in VARIANTS[preset].items():
        if name in rows:
            continue
        settings = Config.load(preset, {f"dynafed.{k}": v for k, v in (BASE | changes).items()}).section(
            "dynafed", DynaFedSettings
        )
        losses: list[float] = []
        key = json.dumps({k: v for k, v in changes.items() if not k.startswith("finetune")})
        began = time.perf_counter()
        if key not in made:
            synthetic = synthesize(
                network,
                path[:RECORDED],
                federation.schema.shape,
                federation.schema.classes,
                settings,
                on_iteration=lambda iteration, loss, x, losses=losses: losses.append(loss),
            )
            made[key] = synthetic, statistics.fmean(losses[-50:])
        synthetic, loss = made[key]
        after = [
            evaluate(federation, finetune(network, model, synthetic, settings, seeds, 1))["accuracy"]
            for model in path[RECORDED:]
        ]
        rows[name] = {
            "before": statistics.fmean(before),
            "before_std": statistics.stdev(before),
            "after": statistics.fmean(after),
            "after_std": statistics.stdev(after),
            "matching_loss": loss,
            "inner_lr": synthetic.inner_lr,
            "seconds": time.perf_counter() - began,
        }
        print(f"{name:50} {statistics.fmean(before):.4f} -> {statistics.fmean(after):.4f}", flush=True)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

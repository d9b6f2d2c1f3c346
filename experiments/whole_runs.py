"""Whole runs at a preset's protocol: FedAvg, DynaFed, and the mean of the last 20 global models of each.

    DYNAFED_DATA=... python experiments/whole_runs.py cpu-fmnist-mlp validation 0,1,2 [VARIANT ...]
    DYNAFED_DATA=... python experiments/whole_runs.py cpu-fmnist-mlp test 0,1,2 [VARIANT ...]

writes experiments/results/whole-<preset>-<split>.json, a row for each variant and seed; rows that are there are not run
again, and a run that was interrupted is resumed (in runs/). On "validation", 5,000 samples (2,000 for the demo) are
carved from the training split; choices are made there. Every variant ends in `+average`, which changes nothing but what
is served, so one run has both: the model itself, and the mean. `final` is the mean accuracy of the last five rounds.
Rows "not in the package" were made with changes of the code that were not worth keeping.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rows import L2
from served_mean import real_samples

from dynafed import Config, resume, run
from dynafed.engine.federation import Federation
from dynafed.synthesis import DynaFedSettings

DYNAFED = L2 | {"method": "dynafed+average"}
TENSOR = DYNAFED | {"dynafed.distance": "quotient", "dynafed.inner_rates": "tensor"}
SCALED: dict[str, Any] = {
    "method": "dynafed+average",
    "dynafed.distance": "quotient",
    "dynafed.inner_rates": "scaled",
    "dynafed.inner_lr_rate": 0.03,
    "dynafed.image_lr": 0.1,
    "dynafed.iterations": 300,
    "dynafed.targets": [2],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg+average"},
    "dynafed, l2": DYNAFED,
    "dynafed, quotient, rates per tensor": TENSOR,
    "dynafed, again every 40 rounds": TENSOR | {"dynafed.resynthesize_every": 40},
    "dynafed, 50 steps at 1e-3": TENSOR | {"dynafed.finetune_lr": 1e-3},
    "dynafed, scaled rates": TENSOR | {"dynafed.inner_rates": "scaled", "dynafed.inner_lr_rate": 0.03},
    "dynafed, scaled": SCALED,
    "dynafed, scaled, again every 40 rounds": SCALED | {"dynafed.resynthesize_every": 40},
    "dynafed, scaled, 20 steps at 1e-4": SCALED | {"dynafed.finetune_lr": 1e-4, "dynafed.finetune_steps": 20},
    "dynafed, scaled, targets of 5": SCALED | {"dynafed.targets": [5]},
    "real samples": TENSOR | {"dynafed.synthetic": "a file"},
    "fedavg, clients get the mean": {"method": "fedavg+average", "average.clients_get": "mean", "average.window": 5},
}
SPLITS: dict[str, dict[str, Any]] = {"validation": {"validation_samples": 5000, "evaluate": "validation"}, "test": {}}


def measures(history: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the model itself and of the mean: the last five rounds, the last 20, and every tenth round."""
    row: dict[str, Any] = {}
    for name, key in (("model", "accuracy_raw"), ("mean", "accuracy")):
        curve = [record.get(key, record["accuracy"]) for record in history]
        row[name] = {
            "final": statistics.fmean(curve[-5:]),
            "last_20": statistics.fmean(curve[-20:]),
            "last_20_std": statistics.stdev(curve[-20:]),
            "curve": [round(accuracy, 4) for accuracy in curve[9::10]],
        }
    row["synthesis"] = {
        record["round"]: {key: record[key] for key in ("matching_loss", "inner_lr", "invariant_share")}
        for record in history
        if "matching_loss" in record
    }
    return row


def with_real_samples(config: Config, file: Path) -> Config:
    """The server has real samples, equally many of each class, in place of D_syn: an upper bound."""
    federation = Federation.create(config.replace(method="fedavg"))
    file.parent.mkdir(parents=True, exist_ok=True)
    real_samples(federation, config.section("dynafed", DynaFedSettings).samples, 0).save(file)
    return config.replace(**{"dynafed.synthetic": str(file)})


def main(preset: str, split: str, seeds: str, *names: str) -> None:
    """Run what is missing."""
    file = Path(__file__).parent / "results" / f"whole-{preset}-{split}.json"
    rows = json.loads(file.read_text()) if file.exists() else {}
    for name, seed in itertools.product(names or VARIANTS, seeds.split(",")):
        key = f"{name}; seed {seed}"
        if key in rows:
            continue
        folder = Path("runs") / f"whole-{preset}-{split}" / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
        config = Config.load(preset, VARIANTS[name] | SPLITS[split] | {"seed": int(seed), "workers": 1})
        if preset == "demo" and split == "validation":
            config = config.replace(validation_samples=2000)
        if name == "real samples":
            config = with_real_samples(config, folder.with_suffix(".safetensors"))
        result = resume(folder) if (folder / "config.toml").exists() else run(config, out=folder)
        rows[key] = measures(result.history)
        file.write_text(json.dumps(rows, indent=1) + "\n")
        finals = {part: round(100 * rows[key][part]["final"], 2) for part in ("model", "mean")}
        print(key, finals, round(result.summary["seconds"]), "s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

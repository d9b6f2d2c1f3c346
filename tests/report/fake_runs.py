"""Run folders as the engine leaves them, with made-up numbers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

MakeRun = Callable[..., Path]


def toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def to_rmse(index: int, record: dict[str, Any]) -> None:
    """Make it a record of a run that learns numbers: errors of 2, 1, 1, ..."""
    del record["accuracy"]
    record["rmse"] = 2.0 if index == 1 else 1.0


def fake_run(
    path: Path,
    *,
    rounds: int = 20,
    top: float = 0.7,
    finished: bool = True,
    classes: int = 10,
    clients: int = 8,
    uneven: bool = False,
    planned: int | None = None,
    sections: dict[str, dict[str, Any]] | None = None,
    blocks: Any = None,
    each: Callable[[int, dict[str, Any]], None] | None = None,
    **keys: Any,
) -> Path:
    """A run folder as the engine leaves it, with smooth made-up numbers; `each` may change a round's record."""
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "method": "fedavg", "rounds": planned or rounds, "seed": 0, "dataset": "fmnist-mini",
        "partition": "dirichlet-balanced", "alpha": 0.1, "evaluate": "test", "target_accuracy": 0.0, "model": "mlp",
        "clients": clients, "participation": 0.5, "local_epochs": 1, "batch_size": 32, "optimizer": "adam", "lr": 0.001,
        "device": "cpu", "workers": 0, "threads": 1, "data_dir": "",
    } | keys  # fmt: skip
    text = "".join(f"{key} = {toml(value)}\n" for key, value in config.items())
    for name, values in (sections or {"mlp": {"width": 64}}).items():
        text += f"\n[{name}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in values.items())
    (path / "config.toml").write_text(text)

    draw = random.Random(f"{config['method']} {config['seed']} {config['alpha']}")
    records = []
    for index in range(1, rounds + 1):
        accuracy = min(0.99, max(0.05, top - (top - 0.1) * math.exp(-6 * index / rounds) + draw.gauss(0, 0.012)))
        record = {
            "round": index, "accuracy": accuracy, "loss": 2.3 * (1 - accuracy) + draw.gauss(0, 0.02),
            "train_loss": 0.9 * math.exp(-3 * index / rounds) + 0.05, "seconds_local": 1.1 + 0.2 * draw.random(),
            "seconds_server": 0.3 + 0.05 * draw.random(), "seconds_eval": 0.12, "seconds": 1.8, "bytes_up": 800_000,
            "bytes_down": 800_000, "clients": sorted(draw.sample(range(clients), max(1, clients // 2))), "dropped": [],
            "rejected": [], "repeats": 0, "skipped": False, "seconds_clients": 2.1, "lr": 0.001,
        }  # fmt: skip
        if each:
            each(index, record)
        records.append(record)
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    split = random.Random(f"split {config['alpha']} {config['seed']}")
    counts = []
    for _ in range(clients):
        weights = [split.gammavariate(float(config["alpha"]), 1) + 1e-12 for _ in range(classes)]
        size = split.randint(20, 400) if uneven else 120
        row = [int(size * weight / sum(weights)) for weight in weights]
        row[row.index(max(row))] += size - sum(row)
        counts.append(row)
    partition = {"classes": classes, "clients": clients, "shown": list(range(clients)), "counts": counts}
    (path / "partition.json").write_text(json.dumps(partition))

    if finished:
        metric = "rmse" if "rmse" in records[-1] else "accuracy"
        scores = [record[metric] for record in records if record.get(metric) is not None]
        last = scores[-5:]
        mean = sum(last) / len(last)
        summary = {
            "metric": metric, f"final_{metric}": mean,
            "final_std": math.sqrt(sum((v - mean) ** 2 for v in last) / len(last)),
            "best": max(scores) if metric == "accuracy" else min(scores), "best_round": 1, "rounds_to_target": None,
            "target_accuracy": config["target_accuracy"], "rounds": rounds, "seconds": 1.8 * rounds,
            "peak_rss_mb": 512.0, "method": config["method"], "dataset": config["dataset"], "seed": config["seed"],
            "parameters": 55_050, "bytes_up": 800_000 * rounds, "bytes_down": 800_000 * rounds,
            "versions": {"python": "3.12.1", "torch": "2.13.0", "numpy": "2.2.0", "dynafed": "0.1.0"},
        }  # fmt: skip
        (path / "summary.json").write_text(json.dumps(summary))
    if blocks is not None:
        (path / "report.json").write_text(json.dumps(blocks))
    return path


def add_synthetic(path: Path, *, samples: int = 40, classes: int = 10, channels: int = 1, size: int = 8) -> Path:
    """Give a run folder synthetic images as a synthesis leaves them: sample i is of class i modulo `classes`."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(samples, channels, size, size)).astype(np.float32)
    logits = np.eye(classes, dtype=np.float32)[np.arange(samples) % classes] * 3
    save_file({"x": x, "logits": logits, "inner_lr": np.array(0.1)}, path / "synthetic.safetensors")
    for iteration in (0, 125, 200):
        sheet = draw.integers(1, 255, size=(3 * size, 10 * size, 3), dtype=np.uint8)
        Image.fromarray(sheet).save(path / f"synthetic-{iteration:06d}.png")
    return path


def synthesis_record(index: int, record: dict[str, Any], at: int = 8) -> None:
    """Change a round's record as DynaFed does: a synthesis in round `at`, refinement afterwards."""
    if index == at:
        by_segment = {str(i): 0.9 + i / 100 for i in range(4)}
        record |= {
            "inner_lr": 0.5, "matching_loss": 0.915, "matching_by_segment": by_segment, "scratch_accuracy": 0.6,
            "cosine_by_segment": {"D_syn": by_segment, "noise": by_segment},
        }  # fmt: skip
        record["seconds_server"] += 20.0
        record["seconds"] += 20.0
    if index > at:
        record["accuracy_before_refine"] = record["accuracy"] - 0.05

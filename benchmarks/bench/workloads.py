"""The federated training jobs that all sides do, and their data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from peers.protocol import Workload

W1 = Workload("w1", "mlp", 128, (784,), clients=80, per_round=32, samples=750)
W1_OWN = replace(W1, name="w1-own")
W2 = Workload("w2", "convnet", 64, (3, 32, 32), clients=40, per_round=16, samples=128)
W3 = Workload("w3", "convnet", 128, (3, 32, 32), clients=80, per_round=32, samples=625)
W4 = Workload("w4", "own", 32, (3, 32, 32), clients=40, per_round=16, samples=500)
W5 = Workload("w5", "resnet8", 16, (3, 32, 32), clients=40, per_round=16, samples=500)
W6 = tuple(
    replace(W1, name=f"w6-{method}", method=method, **changes)  # type: ignore[arg-type]
    # SCAFFOLD's option II, which the peers have, takes a client's own steps for gradients: they must be plain descent.
    for method, changes in {"fedprox": {}, "scaffold": {"optimizer": "sgd", "lr": 0.05}, "moon": {}}.items()
)
WORKLOADS = {workload.name: workload for workload in (W1, W1_OWN, W2, W3, W4, W5, *W6)}


def toy(workload: Workload) -> Workload:
    """The same job in a size that takes no time, to see whether everything works."""
    return replace(workload, clients=8, per_round=4, samples=40, width=min(workload.width, 16))


def write_data(workload: Workload, folder: Path) -> Path:
    """Samples around a center for each class, with some labels wrong so that the loss stays away from zero."""
    rng = np.random.default_rng(0)
    count = workload.clients * workload.samples
    centers = rng.standard_normal((workload.classes, *workload.shape), dtype=np.float32)
    y = rng.integers(0, workload.classes, count)
    folder.mkdir(parents=True, exist_ok=True)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (count, *workload.shape))
    for start in range(0, count, 10_000):
        part = y[start : start + 10_000]
        x[start : start + 10_000] = rng.standard_normal((len(part), *workload.shape), dtype=np.float32)
        x[start : start + 10_000] += 0.1 * centers[part]
    x.flush()
    wrong = rng.random(count) < 0.1
    y[wrong] = rng.integers(0, workload.classes, int(wrong.sum()))
    y[: workload.classes] = np.arange(min(workload.classes, count))
    np.save(folder / "y.npy", y)
    return folder

"""A small learnable problem, and configs that run in a blink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import dynafed
from dynafed import Config
from dynafed.engine.federation import Federation


def blobs(samples: int, seed: int, classes: int = 4, features: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian clouds around fixed centers."""
    centers = np.random.default_rng(7).normal(size=(classes, features)) * 2
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, samples)
    return (centers[y] + rng.normal(size=(samples, features))).astype(np.float32), y


TRAIN, TEST = blobs(400, 1), blobs(200, 2)

TINY: dict[str, Any] = {
    "clients": 8,
    "participation": 0.5,
    "rounds": 6,
    "batch_size": 16,
    "alpha": 0.1,
    "workers": 1,
    "checkpoint_every": 2,
    "mlp.width": 8,
}


def tiny(**changes: Any) -> Config:
    """The config of a run of some milliseconds."""
    return Config.load(None, TINY | {key.replace("__", "."): value for key, value in changes.items()})


def run_tiny(out: Path, **changes: Any) -> dynafed.Result:
    """Run it on the blobs."""
    return dynafed.run(tiny(**changes), train=TRAIN, test=TEST, out=out)


def client_data(federation: Federation, client: int) -> tuple[Tensor, Tensor]:
    """One client's samples and labels."""
    view = federation.client(client)
    return view.x, view.y

"""Every method and some compositions, each with settings that make it quick. A new method is here by itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from problems import TEST, TRAIN, tiny

import dynafed
from dynafed import Config, tree
from dynafed.engine.checkpoint import RunState
from dynafed.methods import METHODS

METHOD_NAMES = sorted(
    name
    for name, kind in ((name, METHODS.load(name)) for name in METHODS.names())
    if kind.__module__.startswith("dynafed.methods.")
)

COMPOSITIONS = [
    "fedprox+fedavgm",
    "scaffold+fedadam",
    "feddyn+median",
    "feddyn+fedyogi",
    "moon+krum+fedavgm",
    "fedmix+feddf",
    "fedgen+abavg",
    "abavg+fedbe+fedavgm",
    "scaffold+dynafed",
    "moon+trimmed-mean+dynafed",
    "scaffold+geometric-median",
]

OTHERWISE = ["scaffold@adam", "feddyn+fedadam@adam"]
"""With another optimizer than SGD on the clients."""

CASES = [*METHOD_NAMES, *COMPOSITIONS, *OTHERWISE]

QUICK: dict[str, dict[str, Any]] = {
    "feddf": {"steps": 4},
    "fedbe": {"epochs": 2, "batch_size": 20, "cycle": 2, "samples": 3},
    "fedgen": {"steps": 3, "hidden": 16, "noise": 4, "batch_size": 16, "client_batch": 8},
    "dynafed": {
        "trajectory": 2,
        "segment": 1,
        "targets": [1],
        "samples": 8,
        "iterations": 3,
        "inner_steps": 2,
        "finetune_steps": 2,
    },
}
"""By method; one that isn't named here runs with its own defaults."""

PARTS: dict[str, Any] = {"train": TRAIN, "test": TEST}


def config(case: str, **changes: Any) -> Config:
    """A run of the case that takes a blink."""
    method, _, optimizer = case.partition("@")
    names = method.split("+")
    quick = {f"{name}.{key}": value for name in names for key, value in QUICK.get(name, {}).items()}
    needs_data = any(METHODS.load(name).needs.server_data for name in names)
    base = {"method": method, "rounds": 4, "server_samples": 40 if needs_data else 0}
    base |= {"optimizer": optimizer or "sgd", "lr": 0.01 if optimizer else 0.1}
    return tiny(**base | quick | changes)


def run(case: str, out: Path, **changes: Any) -> dynafed.Result:
    return dynafed.run(config(case, **changes), out=out, **PARTS)


def everything(state: RunState) -> dict[str, str]:
    """Checksums of all that a run leaves: the model, each method's server state, each client's memory."""
    states = {"model": state.model} | {f"server {name}": part for name, part in state.server.items()}
    memories = {f"client {client}": state.clients.load(client) for client in state.clients.rounds}
    return {name: tree.digest(part) for name, part in (states | memories).items()}


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without what depends on the clock."""
    return [{key: value for key, value in record.items() if "seconds" not in key} for record in history]


def iid(case: str, out: Path) -> float:
    """The final accuracy on data that are alike everywhere."""
    changes: dict[str, Any] = {"rounds": 20, "alpha": 100.0, "local_epochs": 2, "mlp.width": 16, "server_samples": 40}
    if case == "fedgen":  # three steps in a round are too few for a generator to be of use
        changes |= {"fedgen.steps": 20, "fedgen.lr": 3e-3}
    return run(case, out, **changes).final_accuracy


def disturb(seed: int) -> None:
    """Turn the global generators, which nobody should read."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)

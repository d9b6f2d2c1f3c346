"""The config of a cell: the paper's protocol, at its own scale or at one for smaller machines."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynafed.config import Config, presets
from dynafed.errors import UserError
from dynafed.methods import METHODS
from dynafed.report.clean import flatten
from dynafed.report.text import setting

SCALES = {
    "smoke": "a few steps of everything, to see that it runs: the numbers say nothing",
    "cpu": "the paper's protocol with a ConvNet of width 32",
    "paper": "the paper's protocol with its ConvNet of width 128",
}
"""Each with what it is. DynaFed's synthesis is that of the `cpu-*` presets, with the paper's ConvNet that of `WIDE`."""

WIDTHS = {"smoke": 8, "cpu": 32, "paper": 128}

CHOSEN: dict[str, dict[str, Any]] = {
    "feddf": {"feddf.steps": 100, "feddf.validate": True},
    "fedbe": {"fedbe.lr": 1e-5, "fedbe.lr_end": 4e-6},
}
"""Settings of baselines that the paper doesn't state and whose own papers' defaults fail here (docs/methods.md)."""

SMOKE: dict[str, dict[str, Any]] = {
    "feddf": {"feddf.steps": 5},
    "fedbe": {"fedbe.epochs": 1},
    "fedgen": {"fedgen.steps": 5},
}
"""The same for a smoke test."""

WIDE: dict[str, Any] = {
    "dynafed.distance": "quotient",
    "dynafed.inner_rates": "tensor",
    "dynafed.inner_lr": 0.03,
    "dynafed.inner_lr_rate": 0.03,
    "dynafed.image_lr": 0.1,
    "dynafed.iterations": 200,
    "dynafed.finetune_steps": 20,
    "dynafed.finetune_lr": 1e-4,
}
"""DynaFed with the ConvNet of the paper's width (docs/synthesis.md, experiments/wide_synthesis.py)."""

SERVER_SAMPLES = 600
"""Carved from the training split for methods that need server data; the paper doesn't say how many it takes."""

SYNTHESIS = (
    "The paper states an inner rate of 1e-5, with which no D_syn can move anything (docs/synthesis.md). So DynaFed "
    "runs with the synthesis settings of the cpu-* presets, and of its own with the ConvNet at scale paper; the "
    "differences are listed below the table."
)


def cell_config(
    settings: Mapping[str, Any], method: str, seed: int, scale: str, overrides: Mapping[str, Any] | None = None
) -> Config:
    """The config of one cell: `settings` are the column's, `overrides` the user's."""
    return Config.load(*_recipe(settings, method, seed, scale, overrides or {}))


def cell_command(
    settings: Mapping[str, Any], method: str, seed: int, scale: str, overrides: Mapping[str, Any], out: Path
) -> str:
    """The `dynafed run` that leaves the same run in `out`."""
    preset, changes = _recipe(settings, method, seed, scale, overrides)
    base, words = flatten(Config.load(preset).to_dict()), []
    for key, value in changes.items():
        if base.get(key) != value:
            words += ["-s", f"{key}={setting(value)}"]
    return shlex.join(["dynafed", "run", preset, *words, "--out", str(out)])


def _recipe(
    settings: Mapping[str, Any], method: str, seed: int, scale: str, overrides: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """A preset, and what to change in it."""
    if taken := {"method", "seed"} & overrides.keys():
        raise UserError(f"-s {taken.pop()}=...: use --methods and --seeds for these")
    wanted = {**settings, **overrides}
    changes: dict[str, Any] = {"convnet.width": WIDTHS[scale]} if wanted["model"] == "convnet" else {}
    if scale == "paper" and wanted["model"] == "convnet" and "dynafed" in method.split("+"):
        changes |= WIDE
    changes |= settings
    if scale == "smoke":
        changes |= _smoke(wanted)
    return _preset(wanted), changes | _of_method(method, seed, scale) | dict(overrides)


def paper_config(settings: Mapping[str, Any], method: str, seed: int) -> Config:
    """What the paper's text says about the same cell."""
    return Config.load("paper-fmnist-mlp", dict(settings) | _of_method(method, seed, "paper"))


def scaled(config: Config, settings: Mapping[str, Any], method: str) -> dict[str, tuple[Any, Any]]:
    """Where a cell's config differs from the paper's text: our value and the paper's, by key."""
    ours = flatten(config.deciding())
    theirs = flatten(paper_config(settings, method, config.seed).deciding())
    keys = [key for key in theirs | ours if ours.get(key) != theirs.get(key) and key != "method"]
    return {key: (ours.get(key), theirs.get(key)) for key in keys}


def base_method(method: str) -> str:
    """The method of a cell, without the mean of its last models, which is evaluated beside it."""
    return method.removesuffix("+average")


def _of_method(method: str, seed: int, scale: str) -> dict[str, Any]:
    parts = method.split("+")
    changes: dict[str, Any] = {"method": method if "average" in parts else f"{method}+average", "seed": seed}
    for part in parts:
        changes |= CHOSEN.get(part, {})
        if METHODS.load(part).needs.server_data:
            changes["server_samples"] = SERVER_SAMPLES
        changes |= SMOKE.get(part, {}) if scale == "smoke" else {}
    return changes


def _preset(settings: Mapping[str, Any]) -> str:
    """The preset with the synthesis settings for this dataset and network."""
    names = (f"cpu-{settings['dataset']}", f"cpu-{settings['dataset']}-{settings['model']}")
    return next((name for name in names if name in presets()), "cpu-fmnist-mlp")


def _smoke(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything small. FashionMNIST is the built-in part of it."""
    return {
        "dataset": {"fmnist": "fmnist-mini"}.get(settings["dataset"], settings["dataset"]),
        "clients": 10,
        "rounds": 10,
        "local_steps": 10,
        "dynafed.trajectory": settings.get("dynafed.trajectory", 20) // 5 + 2,
        "dynafed.segment": 2,
        "dynafed.targets": [2],
        "dynafed.iterations": 10,
        "dynafed.inner_steps": 3,
        "dynafed.samples": settings.get("dynafed.samples", 200) // 10,
        "dynafed.finetune_steps": 5,
    }

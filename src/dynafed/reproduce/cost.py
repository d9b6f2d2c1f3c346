"""How long the cells of a table or figure take on this machine, from a short measurement. A rough estimate."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from dynafed.config import Config
from dynafed.data.spec import get_spec
from dynafed.engine.run import run
from dynafed.execution import available_cores, synthesis_work
from dynafed.report.clean import flatten
from dynafed.reproduce.cells import PlannedCell
from dynafed.synthesis.settings import DynaFedSettings

SAMPLES, ROUNDS = (64, 256, 1024), 6
"""Of each of two clients in the measurement; short rounds, because the fastest one counts."""

LONG_ENOUGH = 0.05
"""Seconds of a round from which on what isn't training no longer matters."""

FORWARD = 1 / 3
"""What an evaluation costs, in training steps."""

LOCAL = {"feddyn": 1.3, "scaffold": 1.9, "moon": 1.6, "fedmix": 1.2, "fedgen": 1.8}
"""Local training of these methods with the MLP, in that of FedAvg (benchmarks/RESULTS.md)."""


def total_seconds(planned: Iterable[PlannedCell]) -> float:
    """The time of all cells, each folder once, with all cores."""
    return sum(cell_seconds(config) for config in {one.cell.path: one.cell.config for one in planned}.values())


def cell_seconds(config: Config) -> float:
    """The time of one run with all cores."""
    spec = get_spec(config.dataset)
    if spec is None:
        return 0.0
    width = flatten(config.to_dict()).get(f"{config.model}.width", 0)
    step = _seconds_per_sample(config.model, width, tuple(spec.shape), config.batch_size)
    methods = config.method.split("+")
    cores = config.workers or available_cores()
    share = (spec.train - config.server_samples) / config.clients
    local = config.sampled * (config.local_steps * config.batch_size or config.local_epochs * share)
    for method in methods:
        local *= LOCAL.get(method, 1.0)
    evaluated = spec.test * FORWARD * (1 + ("average" in methods) + ("dynafed" in methods))
    samples = config.rounds * (local + evaluated) / cores + config.rounds * _server_samples(config, methods)
    if "dynafed" in methods:
        chosen = config.section("dynafed", DynaFedSettings)
        tuned = max(0, config.rounds - chosen.trajectory) * chosen.finetune_steps * chosen.samples
        samples += (synthesis_work(chosen) + tuned) / cores
    return float(step * samples)


def _server_samples(config: Config, methods: list[str]) -> float:
    """Samples that the server trains on in a round, in one process; teachers are evaluated on theirs."""
    settings: dict[str, Any] = config.to_dict()
    total = 0.0
    if "feddf" in methods:
        total += settings["feddf"]["steps"] * settings["feddf"]["batch_size"]
    if "fedbe" in methods:
        total += settings["fedbe"]["epochs"] * config.server_samples
        total += settings["fedbe"]["samples"] * config.server_samples * FORWARD
    if {"feddf", "fedbe", "abavg"} & {*methods}:
        total += config.sampled * config.server_samples * FORWARD
    return total


@cache
def _seconds_per_sample(model: str, width: int, shape: tuple[int, ...], batch: int) -> float:
    """The time of one sample in one local step, in one process."""
    for samples in SAMPLES:
        seconds = _fastest_round(model, width, shape, batch, samples)
        if seconds > LONG_ENOUGH:
            break
    return seconds / (2 * samples)


def _fastest_round(model: str, width: int, shape: tuple[int, ...], batch: int, samples: int) -> float:
    """The time that two clients train in the fastest round of a short run."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2 * samples, *shape), dtype=np.float32)
    y = np.arange(len(x)) % 10
    changes: dict[str, Any] = {"method": "fedavg", "model": model, "rounds": ROUNDS, "clients": 2, "participation": 1.0}
    changes |= {"batch_size": batch, "partition": "iid", "workers": 1, "kernels": "own", "record": False}
    if width:
        changes[f"{model}.width"] = width
    with tempfile.TemporaryDirectory() as folder:
        done = run(Config.load(None, changes), train=(x, y), test=(x[:32], y[:32]), out=f"{folder}/run")
    return float(min(record["seconds_clients"] for record in done.history[1:]))

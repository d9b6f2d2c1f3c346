"""A method whose strength is zero is FedAvg, bit for bit, with layers that draw random numbers, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from by_hand import Noisy
from problems import TEST, TRAIN, tiny

import dynafed
from dynafed import tree


def bits(path: Path, **changes: Any) -> str:
    config = tiny(**{"rounds": 3, "server_samples": 40, "batch_size": 10, "local_steps": 3} | changes)
    return tree.digest(dynafed.run(config, train=TRAIN, test=TEST, model=Noisy, out=path).state.model)


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> str:
    return bits(tmp_path_factory.mktemp("zero") / "fedavg")


@pytest.mark.parametrize(
    ("method", "off", "on"),
    [
        ("fedprox", {"fedprox__mu": 0.0}, {"fedprox__mu": 0.1}),
        ("feddyn", {"feddyn__alpha": 0.0}, {"feddyn__alpha": 0.1}),
        ("moon", {"moon__mu": 0.0}, {"moon__mu": 1.0}),
        ("fedmix", {"fedmix__ratio": 0.0}, {"fedmix__ratio": 0.1}),
        ("fedgen", {"fedgen__alpha": 0.0, "fedgen__beta": 0.0}, {"fedgen__steps": 2}),
        ("feddf", {"feddf__steps": 0}, {"feddf__steps": 2}),
        ("fedbe", {"fedbe__epochs": 0}, {"fedbe__epochs": 1}),
        ("trimmed-mean", {"trimmed-mean__share": 0.0}, {"trimmed-mean__share": 0.2}),
    ],
)
def test_strength_zero_is_fedavg(tmp_path: Path, fedavg: str, method: str, off: Any, on: Any) -> None:
    assert bits(tmp_path / "off", method=method, **off) == fedavg
    assert bits(tmp_path / "on", method=method, **on) != fedavg

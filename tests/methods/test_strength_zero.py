"""A method whose strength is zero is FedAvg, bit for bit, with layers that draw random numbers, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from by_hand import Noisy
from problems import TEST, TRAIN, tiny

import dynafed
from dynafed import tree
from dynafed.kernels import build


def bits(path: Path, **changes: Any) -> str:
    config = tiny(**{"rounds": 3, "server_samples": 40, "batch_size": 10, "local_steps": 3} | changes)
    return tree.digest(dynafed.run(config, train=TRAIN, test=TEST, model=Noisy, out=path).state.model)


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> str:
    return bits(tmp_path_factory.mktemp("zero") / "fedavg")


CLIENT = {
    "fedprox": {"fedprox__mu": 0.0},
    "feddyn": {"feddyn__alpha": 0.0},
    "moon": {"moon__mu": 0.0},
    "fedmix": {"fedmix__ratio": 0.0},
    "fedgen": {"fedgen__alpha": 0.0, "fedgen__beta": 0.0},
}
"""What takes away all that these methods do to local training."""


@pytest.mark.parametrize(
    ("method", "off", "on"),
    [
        ("fedprox", CLIENT["fedprox"], {"fedprox__mu": 0.1}),
        ("feddyn", CLIENT["feddyn"], {"feddyn__alpha": 0.1}),
        ("moon", CLIENT["moon"], {"moon__mu": 1.0}),
        ("fedmix", CLIENT["fedmix"], {"fedmix__ratio": 0.1}),
        ("fedgen", CLIENT["fedgen"], {"fedgen__steps": 2}),
        ("feddf", {"feddf__steps": 0}, {"feddf__steps": 2}),
        ("fedbe", {"fedbe__epochs": 0}, {"fedbe__epochs": 1}),
        ("trimmed-mean", {"trimmed-mean__share": 0.0}, {"trimmed-mean__share": 0.2}),
    ],
)
def test_strength_zero_is_fedavg(tmp_path: Path, fedavg: str, method: str, off: Any, on: Any) -> None:
    assert bits(tmp_path / "off", method=method, **off) == fedavg
    assert bits(tmp_path / "on", method=method, **on) != fedavg


@pytest.mark.skipif(build.library() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("method", CLIENT)
def test_so_it_is_where_a_kernel_trains_a_whole_epoch(tmp_path: Path, method: str) -> None:
    config = tiny(rounds=2, kernels="own", optimizer="adam", mlp__width=16)
    runs = [
        dynafed.run(config.replace(method=name, **changes), train=TRAIN, test=TEST, out=tmp_path / name)
        for name, changes in (
            ("fedavg", {}),
            (method, {key.replace("__", "."): value for key, value in CLIENT[method].items()}),
        )
    ]
    assert all(run.federation.execution.fused_epochs for run in runs)
    assert len({tree.digest(run.state.model) for run in runs}) == 1

"""FedNova by hand, and where it is FedAvg."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from by_hand import made, number, one
from problems import run_tiny

from dynafed.messages import Update
from dynafed.methods import ServerContext
from dynafed.methods.fednova import accumulated_weight


def combined(ends: list[tuple[float, int, int]], start: float, **changes: Any) -> tuple[float, dict[str, float]]:
    """The model and the metrics of clients (end, steps, examples)."""
    problem: Any = SimpleNamespace(trainable=("w",))
    method = made("fednova", **changes)
    combiner = method.combiner(ServerContext(problem, 1, one(start)))
    assert combiner is not None
    for client, (end, steps, examples) in enumerate(ends):
        combiner.add(Update(client, one(end) | {"n": torch.tensor(steps)}, examples, steps, 0.0, 0.0))
    result = combiner.result()
    assert result.model["n"].dtype == torch.int64
    return number(result.model), dict(result.metrics)


def test_two_clients_by_hand() -> None:
    """From 2, one goes 4 up in 4 steps, the other 2 down in 1: 1 and -2 a step, -1/2 in the mean, times 5/2 steps."""
    model, metrics = combined([(6.0, 4, 1), (0.0, 1, 1)], start=2.0)
    assert model == 2 - 1.25
    assert metrics == {"effective_steps": 2.5}


def test_weights_by_examples() -> None:
    """Three quarters count for the first: 3/4 - 2/4 = 1/4 a step, times 3 + 1/4 steps."""
    model, metrics = combined([(6.0, 4, 3), (0.0, 1, 1)], start=2.0, weighting="examples")
    assert model == 2 + 0.25 * 3.25
    assert metrics == {"effective_steps": 3.25}


def test_momentum_counts_as_often_as_a_gradient_goes_on() -> None:
    assert [accumulated_weight(steps, 0.5) for steps in (1, 2, 3)] == [1.0, 2.5, 4.25]
    assert accumulated_weight(3, 0.0) == 3.0
    assert accumulated_weight(3, 1.0) == 6.0
    model, _ = combined([(3.5, 2, 1), (-1.0, 1, 1)], start=1.0, optimizer="momentum", momentum=0.5)
    assert model == pytest.approx(1 + (2.5 / 2.5 - 2.0) / 2 * (2.5 + 1) / 2)


def test_clients_that_take_the_same_number_of_steps_are_averaged(tmp_path: Path) -> None:
    nova, plain = (run_tiny(tmp_path / method, method=method, local_steps=3) for method in ("fednova", "fedavg"))
    for name, tensor in plain.state.model.items():
        torch.testing.assert_close(nova.state.model[name], tensor, rtol=1e-5, atol=1e-6)
    assert {record["effective_steps"] for record in nova.history} == {3.0}

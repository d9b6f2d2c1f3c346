"""The running mean of the global models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from by_hand import made, number, one
from problems import TEST, TRAIN, run_tiny, tiny

import dynafed
from dynafed import UserError, tree
from dynafed.methods import ServerContext

MODELS = [1.0, 3.0, 8.0, 4.0]


def served(**settings: Any) -> list[float]:
    """What is served after each of the models."""
    method, state, means = made("average", **{f"average__{k}": v for k, v in settings.items()}), {}, []
    problem: Any = SimpleNamespace(trainable=("w",))
    for round_num, value in enumerate(MODELS, 1):
        model = one(value) | {"steps": torch.tensor(round_num)}
        output = method.server_step(model, state, ServerContext(problem, round_num, {}))
        state = output.state
        result = output.served if output.served is not None else output.model
        assert result["steps"].dtype == torch.int64
        means.append(number(result))
        assert (output.served is None) == (settings.get("clients_get") == "mean")
        assert output.model is model or output.served is None
    return means


def test_means_by_hand() -> None:
    assert served(window=2) == [1.0, 2.0, 5.5, 6.0]
    assert served(window=20) == [1.0, 2.0, 4.0, 4.0]
    assert served(kind="since", since=1) == [1.0, 2.0, 4.0, 4.0]
    assert served(kind="since", since=3) == [1.0, 3.0, 8.0, 6.0]
    assert served(kind="exponential", decay=0.5) == [1.0, 2.0, 5.0, 4.5]
    assert served(window=2, clients_get="mean") == [1.0, 2.0, 5.5, 6.0]


@pytest.mark.parametrize("kind", ["last", "exponential", "since"])
def test_the_clients_train_as_without_it_and_both_accuracies_are_reported(tmp_path: Path, kind: str) -> None:
    plain = run_tiny(tmp_path / "plain", rounds=4)
    mean = run_tiny(tmp_path / "mean", rounds=4, method="fedavg+average", average__kind=kind, average__window=3)
    assert tree.digest(mean.state.model) == tree.digest(plain.state.model)
    assert [r["accuracy_raw"] for r in mean.history] == [r["accuracy"] for r in plain.history]
    assert mean.final_accuracy == pytest.approx(sum(r["accuracy"] for r in mean.history) / 4)
    assert mean.state.served is not None
    assert tree.digest(mean.state.served) == tree.digest(dict(mean.model.state_dict()))
    half = tmp_path / "half"
    run_tiny(half, rounds=2, method="fedavg+average", average__kind=kind, average__window=3)
    resumed = dynafed.resume(half, changes={"rounds": 4}, train=TRAIN, test=TEST)
    assert tree.digest(dict(resumed.model.state_dict())) == tree.digest(mean.state.served)
    again = dynafed.resume(half, train=TRAIN, test=TEST)  # nothing left to do
    assert tree.digest(dict(again.model.state_dict())) == tree.digest(mean.state.served)


def test_the_mean_can_be_what_clients_get_and_it_comes_last(tmp_path: Path) -> None:
    mean = run_tiny(tmp_path / "mean", rounds=3, method="fedavg+average", average__clients_get="mean")
    assert mean.state.served is None
    assert tree.digest(mean.state.model) != tree.digest(run_tiny(tmp_path / "plain", rounds=3).state.model)
    with pytest.raises(UserError, match="average must be the last step"):
        tiny(method="average+fedavgm")

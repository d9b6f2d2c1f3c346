"""Server optimizers against arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch
from by_hand import federation_for, made, number, one, seen_by_server
from problems import tiny

from dynafed import UserError
from dynafed.methods import Mean
from dynafed.tree import Tree


def mean(*clients: float) -> Tree:
    combiner = Mean("uniform")
    for client in clients:
        combiner.add_tree(one(client))
    return combiner.result().model


def two_rounds(name: str, **settings: float) -> list[tuple[float, Tree]]:
    """The global model and the moments after two clients first come to 1 and 3, then go 3 down and 1 up."""
    method = made(name, **{f"{name}__{key}": value for key, value in settings.items()})
    state = method.init_server(seen_by_server(0, 0, 2, 2).problem, one(0))
    first = method.server_step(mean(1.0, 3.0), state, seen_by_server(0, 2.0, 2, 2))
    w = number(first.model)
    second = method.server_step(mean(w - 3, w + 1), first.state, seen_by_server(w, w - 1, 2, 2))
    return [(w, first.state), (number(second.model), second.state)]


def test_fedavgm_by_hand() -> None:
    (w1, _), (w2, state) = two_rounds("fedavgm", lr=0.5, momentum=0.5)
    assert w1 == 1.0  # v = 2
    assert number(state, "v/w") == 0.0  # 0.5 * 2 - 1
    assert w2 == 1.0


def test_fedavgm_without_momentum_is_fedavg() -> None:
    (w1, _), (w2, _) = two_rounds("fedavgm", momentum=0.0)
    assert (w1, w2) == (2.0, 1.0)


def test_fedadam_by_hand() -> None:
    (w1, first), (w2, second) = two_rounds("fedadam", lr=0.5, beta1=0.5, beta2=0.75, tau=1.0)
    assert (number(first, "m/w"), number(first, "v/w")) == (1.0, 0.75 + 0.25 * 4)
    assert w1 == pytest.approx(0.5 * 1.0 / (1.75**0.5 + 1))
    assert (number(second, "m/w"), number(second, "v/w")) == (0.0, 0.75 * 1.75 + 0.25)
    assert w2 == pytest.approx(w1)


def test_fedyogi_by_hand() -> None:
    (_, first), (_, second) = two_rounds("fedyogi", beta2=0.75, tau=1.0)
    assert number(first, "v/w") == 1.0 + 0.25 * 4  # 4 is more than v: up by a quarter of it
    assert number(second, "v/w") == 2.0 - 0.25 * 1  # 1 is less: down


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi"])
def test_buffers_pass_through(name: str) -> None:
    method = made(name)
    problem = seen_by_server(0, 0, 1, 1).problem
    model = one(2.0) | {"steps": torch.tensor(7)}
    state = method.init_server(problem, model)
    assert all(key.endswith("/w") for key in state)
    assert method.server_step(model, state, seen_by_server(0, 2.0, 1, 1)).model["steps"] == 7


def test_two_server_optimizers_are_refused() -> None:
    with pytest.raises(UserError, match="fedavgm and fedadam are both server optimizers"):
        tiny(method="fedavgm+fedadam")


def test_moments_start_at_their_values_for_every_trainable_parameter() -> None:
    federation = federation_for("fedadam", fedadam__tau=0.5)
    state = federation.methods.steps[0].init_server(federation.problem, federation.problem.initial_model())
    assert {key.partition("/")[2] for key in state} == set(federation.problem.trainable)
    assert all(bool((tensor == (0.25 if key.startswith("v/") else 0)).all()) for key, tensor in state.items())

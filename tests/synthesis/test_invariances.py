"""Directions that predictions don't depend on: found on the network itself, and taken out of differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dynafed.models import ConvNetSettings, MLPSettings, convnet, mlp
from dynafed.synthesis.invariances import Invariances, find_invariances

HEAD = {"head.weight": 1, "head.bias": 1}


def biases(groups: int) -> dict[str, int]:
    return {"features.0.bias": groups, "features.4.bias": groups} | HEAD


@pytest.mark.parametrize(
    ("norm", "found"),
    [("instance", biases(16)), ("group", biases(8)), ("layer", biases(1)), ("none", HEAD)],
)
def test_a_convnet_s_invariances_follow_from_its_norm(norm: str, found: dict[str, int]) -> None:
    model = convnet((3, 8, 8), 5, ConvNetSettings(width=16, depth=2, norm=norm))
    assert find_invariances(model, (3, 8, 8)).groups == found


class Branches(nn.Module):
    """A network with a parameter that nothing reads, a scale, and logits that aren't the last layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.unread, self.scale = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.tensor(2.0))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.norm(self.first(x)).relu())
        return logits + self.scale * logits.tanh()


class SinglePrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() @ self.weight


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (mlp((6,), 4, MLPSettings(width=8)), HEAD),
        (nn.Linear(6, 3, bias=False), {"weight": 1}),
        (nn.Sequential(nn.Linear(6, 3), nn.Softplus()), {}),
        (Branches(), {"unread": 2, "first.weight": 1, "first.bias": 1}),
        (SinglePrecision(), {}),
    ],
    ids=["mlp", "linear", "softplus", "branches", "no double precision"],
)
def test_any_network_s_invariances_are_found_by_trying(model: nn.Module, found: dict[str, int]) -> None:
    assert find_invariances(model, (6,)).groups == found
    assert find_invariances(model.train(), (6,)).groups == found
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_frozen_layers_are_not_asked() -> None:
    model = mlp((6,), 4, MLPSettings(width=8))
    model.get_submodule("head").requires_grad_(False)
    assert find_invariances(model, (6,)).groups == {}


def test_a_move_along_the_invariances_changes_no_prediction() -> None:
    torch.manual_seed(0)
    model = convnet((3, 8, 8), 5, ConvNetSettings(width=16, depth=2, norm="group")).double()
    invariances = find_invariances(model, (3, 8, 8))
    params = {name: tensor.detach() for name, tensor in model.named_parameters()}
    move = {name: torch.randn_like(tensor) for name, tensor in params.items()}
    kept = invariances.project(move)
    x = torch.randn(7, 3, 8, 8, dtype=torch.float64)

    def predictions(change: dict[str, Tensor]) -> Tensor:
        moved = {name: tensor + change[name] for name, tensor in params.items()}
        return torch.func.functional_call(model, moved, (x,)).softmax(1)

    torch.testing.assert_close(predictions(kept), predictions(move))
    again = invariances.project(kept)
    other = {name: torch.randn_like(tensor) for name, tensor in params.items()}
    projected = invariances.project(other)
    for name in move:
        torch.testing.assert_close(again[name], kept[name])
        torch.testing.assert_close((kept[name] * other[name]).sum(), (move[name] * projected[name]).sum())


def test_shares_by_hand() -> None:
    invariances = Invariances({"w": 1, "b": 2})
    way = {"w": torch.tensor([[3.0], [1.0]]), "b": torch.tensor([1.0, 2.0]), "v": torch.tensor([1.0])}
    assert invariances.shares(way) == pytest.approx({"w": 8 / 16, "b": 5 / 16})
    assert invariances.is_unused("b", way["b"])
    assert not invariances.is_unused("w", way["w"])
    assert invariances.shares({name: torch.zeros_like(tensor) for name, tensor in way.items()}) == {"w": 0, "b": 0}

"""Networks of the user's own on our kernels: what is found in their graphs, and that it computes the same."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import tiny
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import dynafed
from dynafed import kernels
from dynafed.config import KERNELS_VERSION
from dynafed.engine.federation import Federation
from dynafed.kernels import build, graph, ops
from dynafed.models import ConvNetSettings, ResNetSettings, convnet, resnet
from dynafed.synthesis import matching_gradient

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C++ compiler here")


def doubles(*shapes: tuple[int, ...]) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("channels", "groups"), [(16, 1), (16, 4), (21, 7), (5, 5), (12, 0)])
@pytest.mark.parametrize("pool", ops.POOLS)
@pytest.mark.parametrize("low", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shortcut", [False, True])
def test_what_follows_a_convolution_and_its_two_derivatives_are_torchs(
    channels: int, groups: int, pool: str, low: float, shortcut: bool
) -> None:
    rest = ops.Rest(groups, low=low, pool=pool)
    for size in ((4, 6), (5, 3)):
        z, gamma, beta, other = doubles((2, channels, *size), (channels,), (channels,), (2, channels, *size))

        def ours(z: Tensor, *others: Tensor) -> Tensor:
            if groups:
                return rest(z, *others)
            return rest(z, None, None, *others)

        inputs = (z, *((gamma, beta) if groups else ()), *((other,) if shortcut else ()))
        torch.testing.assert_close(
            ours(*inputs), rest.by_torch(z, gamma, beta, other if shortcut else None), rtol=1e-12, atol=1e-12
        )
        assert gradcheck(ours, inputs, fast_mode=True)
        assert gradgradcheck(ours, inputs, fast_mode=True)


@pytest.mark.parametrize("pool", ops.POOLS)
def test_odd_inputs_are_what_torch_makes_of_them(pool: str) -> None:
    """Of other sizes, types and layouts, and numbers that aren't."""
    torch.manual_seed(0)
    rest = ops.Rest(2, low=0.1, pool=pool)
    for shape in ((1, 4, 2, 2), (0, 4, 4, 4), (3, 4, 3, 7), (2, 2, 17, 2)):
        z, gamma, beta, number = (tensor.detach() for tensor in doubles(shape, shape[1:2], shape[1:2], ()))
        for given in (z, z.mT.contiguous().mT, z.to(memory_format=torch.channels_last), number.expand(shape)):
            torch.testing.assert_close(rest(given, gamma, beta), rest.by_torch(given, gamma, beta))
        torch.testing.assert_close(rest(z, None, None), rest.by_torch(z, None, None))
        half = [tensor.bfloat16() for tensor in (z, gamma, beta)]
        torch.testing.assert_close(rest(*half), rest.by_torch(*half))
    one = torch.randn(1, 4, 1, 1)
    if pool == "none":
        torch.testing.assert_close(rest(one, None, None, one), rest.by_torch(one, None, None, one))
    holes = torch.randn(2, 4, 4, 4)
    holes[0, 1, 2, 3], holes[1, 0, 0, 0] = torch.nan, torch.inf
    torch.testing.assert_close(rest(holes, None, None), rest.by_torch(holes, None, None), equal_nan=True)
    wrong: tuple[tuple[Tensor, Tensor], ...] = (
        (torch.ones(3), torch.ones(4)),
        (torch.ones(4, dtype=torch.float64), torch.ones(4)),
    )
    for gamma, beta in wrong:
        with pytest.raises(RuntimeError):
            rest(torch.randn(2, 4, 4, 4), gamma, beta)


def test_of_equal_values_the_first_is_the_largest() -> None:
    for value in (1.0, -1.0):
        z = torch.full((1, 4, 2, 2), value, requires_grad=True)
        rest = ops.Rest(0, low=0.5, pool="max")
        grads = [torch.autograd.grad(one(z, None, None).sum(), z)[0] for one in (rest, rest.by_torch)]
        assert torch.equal(*grads)


class Plain(nn.Module):
    """As users write it: functions between the layers, parts inside, a view at the end."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, 8)
        self.inner = nn.Sequential(nn.Conv2d(8, 16, 5, padding=2, bias=False), nn.InstanceNorm2d(16))
        self.pool = nn.MaxPool2d(2)
        self.conv3 = nn.Conv2d(16, 12, 1)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = self.pool(F.leaky_relu(self.inner(x), 0.2))
        x = F.avg_pool2d(torch.relu(self.conv3(x)), kernel_size=2)
        x = self.drop(x.view(x.size(0), -1))
        out: Tensor = self.out(x)
        return out


class Residual(nn.Module):
    """With sums in place and not, with a norm before the activation and after."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.act = nn.GELU()
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = self.norms[0](self.convs[0](x))
        h += x
        x = F.relu(h, inplace=True)
        x = self.act(self.norms[1](self.convs[1](x)) + x)
        x = x * self.scale + self.norms[2](self.convs[2](x))
        out: Tensor = self.out(x.mean((2, 3)))
        return out


def resnet8() -> nn.Module:
    return resnet((3, 8, 8), 3, ResNetSettings(width=8), stages=(1, 1, 1), width=16)


def mixed(activation: nn.Module) -> nn.Module:
    """Every norm that users take, with one activation."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), activation, nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 12, 3, padding=1), nn.LayerNorm((12, 4, 4)), activation),
        *(nn.Conv2d(12, 8, 3, padding=1), nn.GroupNorm(1, 8), activation, nn.Flatten()),
        *(nn.Linear(128, 16), nn.LayerNorm(16), activation, nn.Linear(16, 3)),
    )


def resnet18() -> nn.Module:
    return resnet((3, 8, 8), 3, ResNetSettings(width=8), stages=(2, 2, 2, 2), width=64)


def fast(network: nn.Module, shape: tuple[int, ...] = (3, 8, 8)) -> nn.Module:
    found = kernels.accelerate(network, torch.randn(1, *shape))
    assert found is not None
    return found


@pytest.mark.parametrize("make", [Plain, Residual, resnet8, lambda: convnet((3, 9, 9), 3, ConvNetSettings(8, 2))])
def test_a_module_of_the_user_s_own_computes_the_same(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    network = make().double().eval()
    ours = fast(network, (3, 9, 9)) if hasattr(network, "features") else fast(network)
    assert list(ours.state_dict()) == list(network.state_dict())
    assert not list(kernels.described(network))
    assert list(kernels.described(ours))
    x = torch.randn(4, 3, 9, 9).double() if hasattr(network, "features") else torch.randn(4, 3, 8, 8).double()
    outcomes = []
    for each in (network, ours, pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        leaves = [x.clone().requires_grad_(), *each.parameters()]
        out = each(leaves[0])
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), leaves)
        outcomes.append([out, *first, *second])
    for expected, *found in zip(*outcomes, strict=True):
        for each in found:
            torch.testing.assert_close(each, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "activation", [nn.ReLU(), nn.LeakyReLU(0.2), nn.GELU(), nn.SiLU(), nn.Tanh()], ids=lambda each: type(each).__name__
)
def test_other_layers_stay_between_ours_and_are_named(activation: nn.Module) -> None:
    torch.manual_seed(0)
    network = mixed(activation).double()
    ours, x = fast(network), torch.randn(3, 3, 8, 8).double()
    assert graph.agree(network, ours, x)
    (said,) = kernels.described(ours)
    own = isinstance(activation, nn.ReLU | nn.LeakyReLU)
    assert said.startswith(
        "the network: 2 norms, 2 activations, 1 poolings" if own else "the network: 2 norms, torch's:"
    )
    assert "LayerNorm" in said
    assert type(activation).__name__ in said  # behind LayerNorm, in any case


def test_a_resnet18_runs_on_ours() -> None:
    (said,) = kernels.described(fast(resnet18()))
    assert said.startswith("features: 20 norms, 8 sums, 17 activations")


def test_training_and_evaluation_differ_as_they_should() -> None:
    class Dropping(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5, self.training)

    network = Dropping()
    ours, x = graph.accelerated(network), torch.randn(64, 3, 8, 8)
    assert ours is not None
    torch.testing.assert_close(ours.eval()(x), network.eval()(x))
    assert (ours.train()(x) == 0).any()
    assert (ours.eval()(x) != 0).all()


def test_what_was_found_is_said() -> None:
    (said,) = kernels.described(fast(Plain()))
    assert said.startswith("the network: 2 norms, 3 activations, 3 poolings, torch's: 3 convolutions, channels last")
    (said,) = kernels.described(fast(resnet8()))
    assert said.startswith("features: 9 norms, 3 sums, 7 activations")


class Asking(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class Counting(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class Listing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return super().forward(x)


class Moving(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x)


class Noisy(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(3)


class Chance(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Optional(Plain):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) if mask is None else super().forward(x) * mask


class Broken(Plain):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("always")


@pytest.mark.parametrize("kind", [Asking, Counting, Listing, Moving, Noisy, Chance, Optional, Broken])
def test_what_does_more_than_compute_its_output_stays_with_torch(kind: type[nn.Module]) -> None:
    network = kind()
    before = set(vars(network))
    found = dict(graph.plans(network))
    assert "" not in found  # parts of it may be
    assert set(vars(network)) == before
    assert graph.traced(network, True) is None


def test_what_computes_something_else_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Plain()
    monkeypatch.setattr(graph, "_slope_below_zero", lambda node, root: 0.3 if "relu" in node.name else None)
    assert graph.accelerated(network) is not None
    assert kernels.accelerate(network, torch.randn(1, 3, 8, 8)) is None


def test_parts_of_what_can_t_be_traced_are_found() -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList([resnet8(), Plain()])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.ways[0](x) if x.mean() > 0 else self.ways[1](x)
            return out

    network = Switch()
    ours, x = fast(network), torch.randn(5, 3, 8, 8)
    assert [line.partition(":")[0] for line in kernels.described(ours)] == ["ways.0.features", "ways.1"]
    for given in (x + 1, x - 1):
        torch.testing.assert_close(ours.eval()(given), network.eval()(given))


class OwnMLP(nn.Module):
    def __init__(self, classes: int = 3, swapped: bool = False) -> None:
        super().__init__()
        if swapped:
            self.last = nn.Linear(16, classes)
        self.first = nn.Linear(64, 16)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        if not swapped:
            self.last = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(F.relu(self.first(x.view(x.shape[0], -1)))))
        return out


class Doubled(OwnMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Turned(OwnMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT.reshape(len(x), -1)) if False else super().forward(x.transpose(2, 3).flatten(1))


def test_an_mlp_is_known_by_its_graph() -> None:
    x = torch.randn(1, 1, 8, 8)
    assert kernels.coverage(OwnMLP(), x) == kernels.Coverage(0, 2 * (kernels.Activation("relu"),))
    assert kernels.coverage(OwnMLP(), x, version=1) == kernels.Coverage(0)
    for other in (OwnMLP(swapped=True), Doubled(), Turned(), OwnMLP().double()):
        assert not kernels.coverage(other, x).mlp


CALLED: dict[str, tuple[Any, tuple[str, float]]] = {
    "F.gelu": (F.gelu, ("gelu", 0.0)),
    "F.gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), ("gelu_tanh", 0.0)),
    "torch.tanh": (torch.tanh, ("tanh", 0.0)),
    "method": (lambda x: x.tanh(), ("tanh", 0.0)),
    "F.silu": (lambda x: F.silu(x, inplace=True), ("silu", 0.0)),
    "F.leaky_relu": (lambda x: F.leaky_relu(x, 0.2), ("leaky_relu", 0.2)),
    "F.leaky_relu by default": (F.leaky_relu, ("leaky_relu", 0.01)),
    "layer": (nn.GELU(approximate="tanh"), ("gelu_tanh", 0.0)),
    "sigmoid": (torch.sigmoid, ("", 0.0)),
    "relu of something else": (lambda x: F.relu(x + 1), ("", 0.0)),
    "rounded": (lambda x: x.relu().round(), ("", 0.0)),
}


@pytest.mark.parametrize("name", CALLED)
def test_activations_are_known_by_what_is_called(name: str) -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 5), nn.Linear(5, 2)
            self.between = CALLED[name][0]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.between(self.first(x)))
            return out

    wanted = CALLED[name][1]
    found = (kernels.Activation(*wanted),) if wanted[0] else ()
    assert kernels.coverage(Called(), torch.randn(1, 8)) == kernels.Coverage(0, found)
    assert kernels.coverage(Called(), torch.randn(1, 8), version=4) == kernels.Coverage(0)


def images(count: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(count, 1, 8, 8)).astype(np.float32))
    y = torch.arange(count) % 3
    return (x, y), (x[:12], y[:12])


def own_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 3)),
    )


@pytest.mark.parametrize("model", [OwnMLP, own_cnn])
def test_runs_keep_the_version_that_they_began_with(model: type[nn.Module], tmp_path: Path) -> None:
    train, test = images(60)
    given = {"model": model, "train": train, "test": test}

    def run(name: str, **changes: object) -> dynafed.Result:
        return dynafed.run(tiny(kernels="own", **changes), out=tmp_path / name, **given)

    whole = run("whole", rounds=3)
    assert whole.federation.execution.kernels
    assert whole.federation.config.kernels_version == KERNELS_VERSION
    old = run("old", rounds=2, kernels_version=1)
    assert not old.federation.execution.kernels
    file = tmp_path / "old" / "config.toml"
    file.write_text(
        file.read_text().replace("kernels_version = 1\n", "")
    )  # as it was written before there were versions
    resumed = dynafed.resume(tmp_path / "old", changes={"rounds": 3, "kernels_version": 0, "kernels": "own"}, **given)
    assert resumed.federation.config.kernels_version == 1
    torchs = run("torch", rounds=3, kernels_version=1)
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, torchs.model.state_dict()[name])
    assert any(not torch.equal(t, torchs.model.state_dict()[name]) for name, t in whole.model.state_dict().items())
    run("part", rounds=2)
    again = dynafed.resume(tmp_path / "part", changes={"rounds": 3, "workers": 1}, **given)
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, whole.model.state_dict()[name])
        torch.testing.assert_close(tensor, torchs.model.state_dict()[name], rtol=1e-2, atol=1e-3)
    with pytest.raises(dynafed.UserError, match=f"the run began with {KERNELS_VERSION}"):
        dynafed.resume(tmp_path / "whole", changes={"rounds": 4, "kernels_version": 1}, **given)


def test_methods_that_want_features_get_them() -> None:
    train, test = images(60)
    config = tiny(kernels="own", method="moon", **{"model": "resnet8", "resnet.width": 8})
    federation = Federation.create(config, train=train, test=test)
    assert federation.execution.kernels
    weights, x = federation.problem.initial_model(), train[0][:4]
    features = federation.problem.features(weights, x)
    torch.testing.assert_close(features, federation.problem.model.get_submodule("features")(x))
    torch.testing.assert_close(federation.problem.head(weights, features), federation.problem.forward(weights, x))


@pytest.mark.parametrize("make", [resnet8, Plain])
def test_matching_on_our_kernels_is_the_same(make: type[nn.Module]) -> None:
    found = []
    for own in (True, False):
        torch.manual_seed(0)
        model = make().double().eval()
        x, y = torch.randn(6, 3, 8, 8).double(), torch.randn(6, 3).double()
        start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        target = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in start.items()}
        found.append(matching_gradient(fast(model) if own else model, start, target, x, y, 0.05, 3, chunk=4))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 1e-9 * theirs.norm()

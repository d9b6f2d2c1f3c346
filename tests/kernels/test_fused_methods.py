"""Every method on the kernel that trains a whole epoch: the steps that torch takes, the same bits however it is run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import TEST, TRAIN, tiny
from torch import Tensor, nn

import dynafed
from dynafed import generator, kernels, tree
from dynafed.engine.federation import Federation
from dynafed.kernels import Activation, FusedLoss, MLPTraining, build
from dynafed.kernels.activations import FUNCTIONS
from dynafed.methods import METHODS, AffineCorrection, ClientContext, Method
from dynafed.methods.fedprox import FedProx
from dynafed.methods.moon import Moon
from dynafed.models import Classifier
from dynafed.optim import Optimizer
from dynafed.tree import Tree

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C++ compiler here")

SIZES = (11, 32, 48, 5)
ODD_SIZES = (11, 20, 33, 5)
RELU = Activation("relu")
NETWORKS = [
    *((SIZES, RELU), (ODD_SIZES, RELU), ((3, 1, 1, 2), RELU)),
    *((sizes, Activation(name, low=0.1)) for name in FUNCTIONS if name != "relu" for sizes in (SIZES, ODD_SIZES)),
]
"""What every loss is tried on: how wide the layers are, and what is between them."""
every_network = pytest.mark.parametrize(
    ("sizes", "between"), NETWORKS, ids=lambda given: str(getattr(given, "name", given))
)


def network(seed: int = 0, sizes: tuple[int, ...] = SIZES) -> Tree:
    """The parameters of a chain of linear layers, column-major."""
    rng = torch.Generator().manual_seed(seed)
    params = {}
    for number, (wide, out) in enumerate(itertools.pairwise(sizes)):
        params[f"{number}.weight"] = torch.randn(wide, out, generator=rng).t() / wide**0.5
        params[f"{number}.bias"] = torch.randn(out, generator=rng) / 10
    return params


def features(params: Tree, x: Tensor, between: Activation = RELU) -> Tensor:
    for weight, bias in _pairs(params)[:-1]:
        x = between(F.linear(x, weight, bias))
    return x


def _pairs(params: Tree) -> list[tuple[Tensor, Tensor]]:
    tensors = list(params.values())
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def head(params: Tree, z: Tensor) -> Tensor:
    return F.linear(z, *_pairs(params)[-1])


def doubles(params: Tree) -> Tree:
    return {name: tensor.double() for name, tensor in params.items()}


def samples(count: int, sizes: tuple[int, ...] = SIZES) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    return torch.randn(count, sizes[0], generator=rng), torch.randint(sizes[-1], (count,), generator=rng)


def method(name: str, **changes: Any) -> Method:
    return METHODS.load(name)(tiny(**{"method": name} | changes))


def context(between: Activation = RELU, **parts: Any) -> ClientContext:
    """What a client half sees, in double precision."""
    seen = partial(features, between=between)
    known = {"forward": lambda params, x: head(params, seen(params, x)), "features": seen, "head": head}
    names = ("client", "global_params", "x", "y", "steps", "lr", "rng")
    empty = {"global_buffers": {}, "extras": {}, "state": {}}
    return ClientContext(**dict.fromkeys(names) | known | empty | parts)


def gradient_of(method: Method, params: Tree, x: Tensor, y: Tensor, client: ClientContext) -> tuple[float, Tree]:
    """The method's loss and its gradient, by autograd in double precision."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in doubles(params).items()}
    loss = method.loss(leaves, x.double(), y, client)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return loss.item(), dict(zip(leaves, grads, strict=True))


def fused_gradient(
    params: Tree, x: Tensor, y: Tensor, loss: FusedLoss | None, *drawn: Tree, between: Activation = RELU
) -> tuple[float, Tree]:
    """The same by the kernel: what one step of plain SGD with rate 1 takes away."""
    after = tree.clone(params)
    sgd, activations = Optimizer("sgd", list(after.values()), 1.0), [between] * (len(params) // 2 - 1)
    train = MLPTraining(list(after.values()), sgd, loss=loss, activations=activations)
    (value,) = train(x, y, np.arange(len(y)), len(y), drawn)
    return float(value), {name: params[name] - after[name] for name in params}


def assert_same(ours: tuple[float, Tree], theirs: tuple[float, Tree]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for name, grad in theirs[1].items():
        torch.testing.assert_close(ours[1][name].double(), grad, rtol=1e-4, atol=1e-6)


@every_network
def test_the_mean_cross_entropy_and_its_gradient(sizes: tuple[int, ...], between: Activation) -> None:
    params, (x, y) = network(sizes=sizes), samples(7, sizes)
    theirs = gradient_of(method("fedavg"), params, x, y, context(between))
    assert_same(fused_gradient(params, x, y, None, between=between), theirs)


@every_network
@pytest.mark.parametrize("count", [1, 7, 32])
@pytest.mark.parametrize("mix", ["taylor", "naive"])
def test_fedmix_s_loss_and_gradient(sizes: tuple[int, ...], between: Activation, count: int, mix: str) -> None:
    params, (x, y) = network(sizes=sizes), samples(count, sizes)
    drawn = {"x": torch.randn(sizes[0]), "y": torch.rand(sizes[-1]).softmax(0)}
    fedmix = method("fedmix", fedmix__ratio=0.3, fedmix__mix=mix)
    theirs = gradient_of(fedmix, params, x, y, context(between, sampled=doubles(drawn)))
    loss = fedmix.fused_loss(context(x=x, extras={"y": torch.zeros(1, sizes[-1])}))
    assert loss is not None
    assert_same(fused_gradient(params, x, y, loss, drawn, between=between), theirs)


@every_network
@pytest.mark.parametrize("count", [1, 7, 32])
def test_moon_s_loss_and_gradient(sizes: tuple[int, ...], between: Activation, count: int) -> None:
    params, other, last = (network(seed, sizes) for seed in range(3))
    x, y = samples(count, sizes)
    x[0] = -100.0 if count > 1 and between == RELU else x[0]  # no features
    moon = method("moon", moon__mu=2.0)
    theirs = gradient_of(moon, params, x, y, context(between, global_params=doubles(other), state=doubles(last)))
    declared = moon.fused_loss(context(global_params=other, state=last))
    assert declared is not None
    activations = [between] * (len(sizes) - 2)
    held = tuple(kernels.features(list(model.values()), x, activations) for model in declared.models)
    assert_same(fused_gradient(params, x, y, replace(declared, held=held), between=between), theirs)


def test_features_that_are_all_zero_have_no_gradient() -> None:
    """Nor is it NaN."""
    params, (x, y) = network(), samples(3)
    params["1.bias"] -= 1000
    other = network(1)
    held = tuple(kernels.features(list(model.values()), x) for model in (other, params))
    assert not held[1].any()
    moon = method("moon")
    theirs = gradient_of(moon, params, x, y, context(global_params=doubles(other), state=doubles(params)))
    loss = moon.fused_loss(context(global_params=other, state=params))
    assert loss is not None
    assert_same(fused_gradient(params, x, y, replace(loss, held=held)), theirs)


@every_network
@pytest.mark.parametrize(("count", "hidden", "noise"), [(1, 32, 8), (7, 20, 3), (32, 64, 16)])
def test_fedgen_s_loss_and_gradient(
    sizes: tuple[int, ...], between: Activation, count: int, hidden: int, noise: int
) -> None:
    params, (x, y) = network(sizes=sizes), samples(count, sizes)
    torch.manual_seed(1)
    net = generator.fresh(noise, sizes[-1], hidden, sizes[-2])
    net["1.weight"], net["1.bias"] = torch.rand(hidden), torch.randn(hidden)
    drawn = {"labels": torch.randint(sizes[-1], (6,)), "noise": torch.randn(6 + count, noise)}
    fedgen = method("fedgen", fedgen__client_batch=6, fedgen__noise=noise, fedgen__hidden=hidden)
    extras = tree.nest({"net": net, "seen": {"rounds": torch.tensor(3)}})
    fading = {"fading": torch.tensor(0.98**3, dtype=torch.float64)}
    eye = torch.eye
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "eye", lambda classes, device: eye(classes, device=device, dtype=torch.float64))
        theirs = gradient_of(
            fedgen,
            params,
            x,
            y,
            context(
                between,
                sampled={"labels": drawn["labels"], "noise": drawn["noise"].double()} | fading,
                extras={name: tensor.double() for name, tensor in extras.items()},
            ),
        )
    loss = fedgen.fused_loss(context(extras=extras))
    assert loss is not None
    assert_same(fused_gradient(params, x, y, loss, drawn, between=between), theirs)
    assert fedgen.fused_loss(context(extras=extras | {"seen/rounds": torch.tensor(0)})) is None


@every_network
@pytest.mark.parametrize("count", [1, 33, 300])
def test_the_mean_gradient_and_the_features(sizes: tuple[int, ...], between: Activation, count: int) -> None:
    params, (x, y) = network(sizes=sizes), samples(count, sizes)
    tensors, activations = list(params.values()), [between] * (len(sizes) - 2)
    before = tree.digest(params)
    _, theirs = gradient_of(method("fedavg"), params, x, y, context(between))
    for ours, grad in zip(kernels.mean_gradient(tensors, x, y, activations), theirs.values(), strict=True):
        torch.testing.assert_close(ours.double(), grad, rtol=1e-4, atol=1e-6)
    assert tree.digest(params) == before
    found = kernels.features(tensors, x, activations)
    torch.testing.assert_close(found, features(params, x, between), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations_are_torch_s(name: str) -> None:
    """From where the tails are nothing to where they are everything, and near zero, where digits are lost first."""
    between, around = Activation(name, low=0.1), torch.logspace(-6, 2, 500)
    z = torch.cat([-around, torch.zeros(1), around]).unsqueeze(1)
    params = [torch.ones(1, 1), torch.zeros(1), torch.ones(1, 1), torch.zeros(1)]
    wanted = between(z.double())
    error = (kernels.features(params, z, [between]).double() - wanted).abs()
    assert (error <= 3e-7 * wanted.abs() + 1e-37).all() if name == "tanh" else (error <= 3e-7 * z.abs()).all()


STEPS = {
    "sgd": torch.optim.SGD,
    "momentum": lambda params, lr, weight_decay: torch.optim.SGD(params, lr, momentum=0.9, weight_decay=weight_decay),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize("sizes", [SIZES, ODD_SIZES])
@pytest.mark.parametrize("optimizer", STEPS)
@pytest.mark.parametrize("pulled", [True, False])
@pytest.mark.parametrize("shifted", [True, False])
def test_every_optimizer_takes_torchs_steps_with_every_correction(
    optimizer: str, pulled: bool, shifted: bool, sizes: tuple[int, ...]
) -> None:
    params, start, added = (network(seed, sizes) for seed in range(3))
    x, y = samples(40, sizes)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in doubles(params).items()}
    theirs = STEPS[optimizer](list(leaves.values()), lr=0.01, weight_decay=0.1)
    order = np.random.default_rng(0).permutation(40)
    for batch in itertools.repeat(torch.from_numpy(order).split(13), 3):
        for index in batch:
            loss = F.cross_entropy(head(leaves, features(leaves, x[index].double())), y[index])
            theirs.zero_grad()
            loss.backward()
            for name, leaf in leaves.items():
                assert leaf.grad is not None
                leaf.grad += 0.3 * (leaf.detach() - start[name]) * pulled + added[name] * shifted
            theirs.step()
    own = Optimizer(optimizer, list(params.values()), 0.01, weight_decay=0.1)
    train = MLPTraining(
        list(params.values()),
        own,
        scale=0.3 if pulled else 0.0,
        reference=list(start.values()),
        shift=[tensor.contiguous().double() for tensor in added.values()] if shifted else (),
    )
    for _ in range(3):
        train(x, y, order, 13)
    for name, leaf in leaves.items():
        torch.testing.assert_close(params[name].double(), leaf.detach(), rtol=1e-4, atol=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "momentum": {"optimizer": "momentum", "lr": 0.01},
    "fedprox": {"fedprox__mu": 0.5},
    "feddyn": {"feddyn__alpha": 0.1},
    "scaffold": {},
    "moon": {},
    "fedmix": {"fedmix__ratio": 0.2},
    "fedgen": {"fedgen__steps": 3},
    "scaffold+fedprox": {"fedprox__mu": 0.5},
    "fedprox+moon": {"fedprox__mu": 0.5},
}


def run(out: Path, name: str, **changes: Any) -> dynafed.Result:
    named = {} if name in STEPS else {"method": name}
    config = tiny(**{"rounds": 3, "mlp__width": 16, "kernels": "own"} | named | CASES[name] | changes)
    return dynafed.run(config, train=TRAIN, test=TEST, out=out)


@pytest.mark.parametrize("width", [16, 20])
@pytest.mark.parametrize("name", CASES)
def test_a_run_on_the_kernel_is_torchs_run_with_the_same_bits_however_it_is_executed(
    name: str, width: int, tmp_path: Path
) -> None:
    one = run(tmp_path / "one", name, mlp__width=width)
    assert one.federation.execution.fused_epochs
    theirs = run(tmp_path / "torch", name, mlp__width=width, kernels="torch")
    for key, tensor in one.state.model.items():
        torch.testing.assert_close(tensor, theirs.state.model[key], rtol=1e-4, atol=1e-5)
    bits = tree.digest(one.state.model)
    assert bits != tree.digest(theirs.state.model)
    assert [record["train_loss"] for record in one.history] == pytest.approx(
        [record["train_loss"] for record in theirs.history], rel=1e-4
    )
    run(tmp_path / "part", name, mlp__width=width, rounds=2)
    resumed = dynafed.resume(tmp_path / "part", changes={"rounds": 3, "workers": 2}, train=TRAIN, test=TEST)
    watched = run(tmp_path / "watched", name, mlp__width=width, watch=[0, 1, 2, 3])
    assert tree.digest(resumed.state.model) == tree.digest(watched.state.model) == bits


def test_a_run_that_was_begun_on_torchs_kernels_stays_there(tmp_path: Path) -> None:
    """As were those of methods for which there was no kernel yet: what was chosen is in the run's config."""
    whole = run(tmp_path / "whole", "fedprox", kernels="torch")
    run(tmp_path / "part", "fedprox", kernels="torch", rounds=2)
    resumed = dynafed.resume(tmp_path / "part", changes={"rounds": 3}, train=TRAIN, test=TEST)
    assert not resumed.federation.execution.fused_epochs
    assert tree.digest(resumed.state.model) == tree.digest(whole.state.model)


class Drift(Method, register=False):
    """A user's own method: steps go towards a constant."""

    name = "drift"

    def affine_correction(self, client: ClientContext) -> AffineCorrection:
        """Half of the way from the model to twice the global one."""
        twice = {name: 2 * tensor for name, tensor in client.global_params.items()}
        return AffineCorrection(0.5, twice, tree.map_tensors(torch.ones_like, twice))


class OtherCorrection(FedProx, register=False):
    """Declares FedProx's and does something else."""

    def correct_gradients(self, grads: Tree, params: Tree, client: ClientContext) -> Tree:
        """Leave them."""
        return grads


class OtherLoss(Moon, register=False):
    """Declares MOON's and has another."""

    def loss(self, params: Tree, x: Tensor, y: Tensor, client: ClientContext) -> Tensor:
        """Twice as much."""
        return 2 * super().loss(params, x, y, client)


def test_what_a_method_declares_counts_unless_a_subclass_overrides_what_it_stands_for() -> None:
    assert all(METHODS.load(name).declares_steps() for name in METHODS.names())
    assert Drift.declares_steps()
    assert Drift.corrects_gradients()
    assert not OtherCorrection.declares_steps()
    assert not OtherLoss.declares_steps()


@pytest.fixture
def drift() -> Iterator[None]:
    METHODS.add("drift", Drift)
    yield
    METHODS.remove("drift")


@pytest.mark.usefixtures("drift")
def test_a_method_of_one_s_own_takes_the_kernel_and_corrections_add_up(tmp_path: Path) -> None:
    ends = [
        dynafed.run(
            tiny(method="fedprox+drift", mlp__width=16, fedprox__mu=0.3, kernels=kernels, rounds=2),
            train=TRAIN,
            test=TEST,
            out=tmp_path / kernels,
        )
        for kernels in ("own", "torch")
    ]
    assert ends[0].federation.execution.fused_epochs
    for key, tensor in ends[0].state.model.items():
        torch.testing.assert_close(tensor, ends[1].state.model[key], rtol=1e-4, atol=1e-5)


def test_the_sum_of_corrections_is_one_after_the_other() -> None:
    grads, params = network(6), network(7)
    some = (
        AffineCorrection(),
        AffineCorrection(0.5, network(1)),
        AffineCorrection(2.0, network(3), network(4)),
        AffineCorrection(shift=network(5)),
    )
    for one, two in itertools.product(some, some):
        in_turn = two(one(grads, params), params)
        for name, grad in (one + two)(grads, params).items():
            torch.testing.assert_close(grad, in_turn[name])


def test_features_must_be_what_the_last_layer_sees() -> None:
    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(6, 16), nn.ReLU()), 16, 4)
            self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))  # type: ignore[assignment]

    def fused(name: str, model: Any) -> bool:
        config = tiny(method=name, kernels="own")
        return Federation.create(config, train=TRAIN, test=TEST, model=model).execution.fused_epochs

    assert fused("moon", lambda: Classifier(nn.Sequential(nn.Linear(6, 16), nn.ReLU()), 16, 4))
    assert not fused("moon", Two)


def test_the_kernel_refuses_what_it_would_misread() -> None:
    params, (x, y) = list(network().values()), samples(4)
    order, optimizer = np.arange(4), Optimizer("sgd", params, 0.1)
    with pytest.raises(ValueError, match="is for no parameter"):
        MLPTraining(params, optimizer, shift=[torch.zeros(3) for _ in params])
    with pytest.raises(ValueError, match="shorter"):
        MLPTraining(params, optimizer, shift=params[:-1])
    mixed = MLPTraining(params, optimizer, loss=kernels.mixture_loss(0.1, True, SIZES[0], SIZES[-1]))
    with pytest.raises(ValueError, match="'x' must have 11 numbers, not 12"):
        mixed(x, y, order, 4, [{"x": torch.zeros(12), "y": torch.zeros(5)}])
    with pytest.raises(ValueError, match="longer"):
        mixed(x, y, order, 2, [{"x": torch.zeros(11), "y": torch.zeros(5)}])
    few = MLPTraining(params, optimizer, loss=replace(kernels.contrast_loss({}, {}, 1.0, 1.0), held=(x[:3], x[:3])))
    with pytest.raises(ValueError, match="twice 48 features for each of 4 samples"):
        few(x, y, order, 4)
    single = list(network(sizes=(4, 3)).values())
    with pytest.raises(ValueError, match="one layer has no features"):
        MLPTraining(single, None, loss=kernels.mixture_loss(0.1, True, 4, 3))
    with pytest.raises(ValueError, match="one layer has no features"):
        kernels.features(single, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="must have 11 numbers"):
        kernels.features(params, x[:, 1:])
    with pytest.raises(ValueError, match="in single precision"):
        kernels.features(params, x.double())
    with pytest.raises(ValueError, match="in single precision"):
        kernels.features(list(doubles(network()).values()), x)
    with pytest.raises(ValueError, match="2 hidden layers have 2 activations, not 3"):
        kernels.features(params, x, [RELU] * 3)
    with pytest.raises(ValueError, match="labels must be whole numbers"):
        mixed(x, y.float(), order, 4)
    net = generator.fresh(3, SIZES[-1], 16, SIZES[-2] + 16)
    with pytest.raises(ValueError, match="generator doesn't fit"):
        MLPTraining(params, optimizer, loss=kernels.practice_loss(net, 1.0, 1.0, 4, 3))

"""A whole ConvNet in one call against autograd on torch's kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import tiny
from torch import Tensor, nn

import dynafed
from dynafed import UserError, kernels
from dynafed.config import KERNELS_VERSION, kept_bytes
from dynafed.kernels import build
from dynafed.kernels.network import ConvNet
from dynafed.models import Classifier, ConvNetSettings, convnet
from dynafed.synthesis import matching, matching_gradient
from dynafed.synthesis.matching import InnerProblem
from dynafed.tree import Tree

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C++ compiler here")

CLASSES = 5


def network(shape: tuple[int, ...], width: int, depth: int, dtype: torch.dtype = torch.float64) -> Classifier:
    torch.manual_seed(0)
    model = convnet(shape, CLASSES, ConvNetSettings(width=width, depth=depth)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # norms, too, are no identity
    return model


def accelerated(model: nn.Module, version: int = KERNELS_VERSION) -> nn.Module:
    found = kernels.accelerate(model, version=version)
    assert found is not None
    return found


def inner(model: nn.Module, labels: Tensor, chunk: int) -> InnerProblem:
    return InnerProblem([model] * -(-len(labels) // chunk), labels, 0.3, chunk)


def given(shape: tuple[int, ...], model: nn.Module, count: int = 5) -> tuple[Tree, Tree, Tensor, Tensor]:
    params = {name: tensor.detach() for name, tensor in model.named_parameters()}
    direction = {name: torch.randn_like(tensor) for name, tensor in params.items()}
    dtype = next(iter(params.values())).dtype
    return params, direction, torch.randn(count, *shape, dtype=dtype), torch.rand(count, CLASSES, dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "width", "depth"),
    [
        ((3, 32, 32), 32, 3),
        ((1, 28, 28), 16, 3),
        ((3, 8, 8), 24, 2),
        ((1, 4, 12), 8, 2),
        ((3, 12, 20), 16, 2),
        ((3, 6, 2), 8, 1),
    ],
)
def test_the_gradient_and_the_product_are_autograds(shape: tuple[int, ...], width: int, depth: int) -> None:
    model = network(shape, width, depth)
    params, direction, x, labels = given(shape, model)
    fast = accelerated(model)
    whole = ConvNet.of(fast)
    assert whole is not None
    assert whole.fits(params, x)
    ours, theirs = (inner(one, labels, 3) for one in (fast, model))
    gradients = ours.gradient(params, x), theirs.gradient(params, x)
    products = [one.hessian_vector_product(params, x, direction) for one in (ours, theirs)]
    for found, expected in (gradients, (products[0][0], products[1][0])):
        assert found.keys() == expected.keys()
        largest = max(float(tensor.norm()) for tensor in expected.values())  # a bias before a norm has none
        for name, tensor in found.items():
            assert tensor.shape == expected[name].shape
            assert float((tensor - expected[name]).norm()) <= 1e-12 * max(float(expected[name].norm()), largest)
    for one, other in zip(products[0][1:], products[1][1:], strict=True):
        assert float((one - other).norm()) <= 1e-12 * float(other.norm())
    torch.testing.assert_close(whole.logits(params, x), model(x).detach(), rtol=1e-10, atol=1e-10)


def test_the_product_is_the_gradients_derivative() -> None:
    model = network((3, 8, 8), 16, 2)
    params, direction, x, labels = given((3, 8, 8), model)
    ours = inner(accelerated(model), labels, 5)
    step = 1e-6
    ahead, behind = (
        ours.gradient({name: tensor + sign * step * direction[name] for name, tensor in params.items()}, x)
        for sign in (1, -1)
    )
    product, _, _ = ours.hessian_vector_product(params, x, direction)
    for name, tensor in product.items():
        torch.testing.assert_close((ahead[name] - behind[name]) / (2 * step), tensor, rtol=1e-5, atol=1e-7)


def test_a_sequential_network_is_taken_as_well() -> None:
    model = network((3, 8, 8), 16, 2)
    layers = nn.Sequential(*model.features, model.head)
    params, direction, x, labels = given((3, 8, 8), layers)
    fast = accelerated(layers)
    assert ConvNet.of(fast) is not None
    ours, theirs = (inner(one, labels, 5).hessian_vector_product(params, x, direction) for one in (fast, layers))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_kept_and_how_many_threads_there_are_change_no_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, steps = (3, 8, 8), 4
    model = network(shape, 16, 2, dtype)
    start, target, x, y = given(shape, model, 7)
    fast = accelerated(model)
    whole = ConvNet.of(fast)
    assert whole is not None
    kept: list[bool] = []
    product = ConvNet.product
    monkeypatch.setattr(ConvNet, "product", lambda *all: kept.append(all[-1] is not None) or product(*all))
    step_bytes = whole.room(x, CLASSES) * x.itemsize
    found = []
    for budget, expected in ((0, 0), (2 * step_bytes, 2), (10 * step_bytes, steps)):
        for threads in (1, 2):
            kept.clear()
            monkeypatch.setattr(matching, "kept_bytes", lambda budget=budget: budget)
            found.append(matching_gradient(fast, start, target, x, y, 0.05, steps, chunk=3, threads=threads))
            assert sum(kept) == 3 * expected
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))


def test_the_memory_for_it_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAFED_KEEP_MB", raising=False)
    assert kept_bytes() == 0
    monkeypatch.setenv("DYNAFED_KEEP_MB", "100")
    assert kept_bytes() == 100 * 2**20
    monkeypatch.setenv("DYNAFED_KEEP_MB", "much")
    with pytest.raises(UserError, match="DYNAFED_KEEP_MB = 'much'"):
        kept_bytes()


def test_older_versions_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network((3, 8, 8), 16, 2)
    start, target, x, y = given((3, 8, 8), model)
    monkeypatch.setattr(ConvNet, "_run", lambda *_: pytest.fail("an older version has no such kernel"))
    for version in (1, 2):
        fast = accelerated(model, version)
        assert ConvNet.of(fast) is None
        matching_gradient(fast, start, target, x, y, 0.05, 1)


def changed(change: Callable[[Classifier], object], shape: tuple[int, ...] = (3, 8, 8)) -> nn.Module:
    model = network(shape, 16, 2)
    change(model)
    return accelerated(model)


def test_what_is_something_else_is_not_taken() -> None:
    def hook(model: nn.Module) -> None:
        model.register_forward_hook(lambda *_: None)

    others = [
        network((3, 8, 8), 16, 2),
        nn.Linear(3, 2),
        changed(hook),
        changed(lambda model: setattr(model.features[5], "eps", 1e-3)),
        changed(lambda model: setattr(model, "head", nn.Linear(64, CLASSES, bias=False))),
        changed(lambda model: setattr(model, "head", nn.Sequential(nn.Linear(64, CLASSES)))),
        changed(lambda model: model.features.append(nn.ReLU())),
        changed(lambda model: model.features.insert(4, nn.Identity())),
        changed(lambda model: setattr(model.features[4], "padding", (2, 2))),
        accelerated(network((2, 8, 8), 16, 2)),
    ]
    for other in others:
        assert ConvNet.of(other) is None


def test_samples_and_parameters_that_do_not_fit_are_left_to_the_others() -> None:
    model = network((3, 8, 8), 16, 2)
    params, direction, x, labels = given((3, 8, 8), model)
    fast = accelerated(model)
    whole = ConvNet.of(fast)
    assert whole is not None
    assert whole.fits(params, x)
    assert not whole.fits(params, x[:0])
    assert not whole.fits(params, x[:, :1])
    assert not whole.fits(params, x[..., :6])
    assert not whole.fits(params, x.float())
    assert not whole.fits(params, torch.randn(2, 3, 16, 16, dtype=x.dtype))
    trained = {name: tensor for name, tensor in params.items() if not name.startswith("head")}
    assert not whole.fits(trained, x)
    ours, theirs = (inner(one, labels, 5).hessian_vector_product(trained, x, direction) for one in (fast, model))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 16, 16)])
def test_the_loss_of_whole_labels_and_its_gradient_are_autograds(shape: tuple[int, ...]) -> None:
    model = network(shape, 16, 2)
    whole = ConvNet.of(accelerated(model))
    assert whole is not None
    params, _, x, _ = given(shape, model)
    y = torch.tensor([0, 4, 1, 1, 3])
    loss, grads = whole.loss_gradient(params, x, y)
    expected = F.cross_entropy(model(x), y)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
    for ours, torchs in zip(grads, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "moon"])
def test_clients_train_on_it_with_corrections(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And on torch's kernels they come to the same model, to rounding; with other losses it isn't used."""
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(60, 1, 8, 8)).astype(np.float32), np.arange(60) % 3
    given: dict[str, Any] = {"train": (images, labels), "test": (images, labels)}
    calls, plain = [], ConvNet.loss_gradient
    monkeypatch.setattr(ConvNet, "loss_gradient", lambda self, *inputs: calls.append(1) or plain(self, *inputs))

    def run(name: str, **changes: Any) -> Tree:
        config = tiny(
            model="convnet", convnet__width=16, convnet__depth=2, method=method, optimizer="sgd", rounds=2, **changes
        )
        model: nn.Module = dynafed.run(config, out=tmp_path / name, **given).model
        return model.state_dict()

    ours = run("own", kernels="own", workers=1)
    assert bool(calls) == (method != "moon")
    for name, tensor in run("torch", kernels="torch").items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)
    for name, tensor in run("two", kernels="own", workers=2).items():
        assert torch.equal(ours[name], tensor)
    count = len(calls)
    run("before", kernels="own", kernels_version=2, workers=1)
    assert len(calls) == count


def test_it_evaluates_from_version_4_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of version 3 goes on as it began, and comes to the same model."""
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(60, 1, 8, 8)).astype(np.float32), np.arange(60) % 3
    calls, plain = [], ConvNet.logits
    monkeypatch.setattr(ConvNet, "logits", lambda self, *inputs: calls.append(1) or plain(self, *inputs))
    found = {}
    for version in (3, 4):
        config = tiny(
            model="convnet", convnet__width=16, convnet__depth=2, rounds=2, kernels="own", kernels_version=version
        )
        result = dynafed.run(
            config.replace(workers=1), out=tmp_path / str(version), train=(images, labels), test=(images, labels)
        )
        assert bool(calls) == (version == 4)
        found[version] = result
    for name, tensor in found[3].model.state_dict().items():
        assert torch.equal(tensor, found[4].model.state_dict()[name])
    for before, now in zip(found[3].history, found[4].history, strict=True):
        assert now["accuracy"] == before["accuracy"]
        assert now["loss"] == pytest.approx(before["loss"], rel=1e-5)

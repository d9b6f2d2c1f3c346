"""The adjoint gradient against autograd through the unrolled inner loop, and its memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dynafed import UserError
from dynafed.models import ConvNetSettings, MLPSettings, convnet, mlp
from dynafed.seeds import Seeds
from dynafed.synthesis import matching_gradient
from dynafed.synthesis.augment import _APPLY, OPERATIONS, augment
from dynafed.synthesis.invariances import Invariances, find_invariances
from dynafed.synthesis.matching import Augment, distance_between, soft_cross_entropy
from dynafed.tree import Tree


def networks(dtype: torch.dtype) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    with Seeds(0).torch_seeded("model"):
        return {
            "mlp": (mlp((1, 8, 8), 5, MLPSettings(width=12)).to(dtype), (1, 8, 8)),
            "convnet": (convnet((3, 8, 8), 5, ConvNetSettings(width=6, depth=2)).to(dtype), (3, 8, 8)),
            "rows": (mlp((7,), 5, MLPSettings(width=9, depth=1)).to(dtype), (7,)),
        }


def problem(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tree, Tree, Tensor, Tensor]:
    model, shape = networks(dtype)[name]
    rng = np.random.default_rng(1)
    start = {key: tensor.detach().clone() for key, tensor in model.named_parameters()}
    target = {key: tensor + torch.from_numpy(0.05 * rng.normal(size=tensor.shape)) for key, tensor in start.items()}
    target = {key: tensor.to(dtype) for key, tensor in target.items()}
    x, y = rng.normal(size=(20, *shape)), rng.normal(size=(20, 5))
    return model, start, target, torch.from_numpy(x).to(dtype), torch.from_numpy(y).to(dtype)


def unrolled(
    model: nn.Module,
    start: Tree,
    target: Tree,
    x: Tensor,
    y: Tensor,
    lr: float | Tensor,
    steps: int,
    kind: str,
    change: Augment,
) -> tuple[Tensor, ...]:
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    rate = torch.as_tensor(lr, dtype=x.dtype).requires_grad_()
    params = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    for step in range(steps):
        loss = soft_cross_entropy(functional_call(model, params, (change(x, step),)), y.softmax(1)) / len(x)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        rates = rate.expand(len(grads))
        params = {
            name: tensor - rates[number] * grad
            for number, ((name, tensor), grad) in enumerate(zip(params.items(), grads, strict=True))
        }
    distance = distance_between(kind, params, start, target, find_invariances(model, tuple(x.shape[1:])))
    return distance.detach(), *torch.autograd.grad(distance, (x, y, rate))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", ["quotient", "l2", "cosine"])
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("rates", ["single", "tensor"])
@pytest.mark.parametrize("name", ["mlp", "convnet", "rows"])
def test_the_adjoint_is_the_unrolled_gradient(
    name: str, rates: str, changed: bool, kind: str, dtype: torch.dtype, close: float
) -> None:
    model, start, target, x, y = problem(name, dtype)
    lr = 0.3 if rates == "single" else torch.linspace(0.1, 0.5, len(start), dtype=torch.float64)

    def change(batch: Tensor, step: int) -> Tensor:
        return augment(batch, Seeds(3).rng("augment", step)) if changed else batch

    exact = unrolled(model, start, target, x, y, lr, 12, kind, change)
    found = matching_gradient(
        model, start, target, x, y, lr, 12, distance=kind, augment=change if changed else None, chunk=7
    )
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        assert float((one - other).norm() / other.norm()) < close


def test_chunks_and_scales_change_nothing_but_what_they_say() -> None:
    model, start, target, x, y = problem("convnet", torch.float64)
    whole = matching_gradient(model, start, target, x, y, 0.3, 5, chunk=20)
    for one, other in zip(whole, matching_gradient(model, start, target, x, y, 0.3, 5, chunk=3), strict=True):
        torch.testing.assert_close(one, other)
    scaled = matching_gradient(model, start, target, x, y, 0.6, 5, loss_scale=0.5)
    for one, other in zip(whole[:3], scaled[:3], strict=True):
        torch.testing.assert_close(one, other)


def test_distances_by_hand() -> None:
    start, target = {"w": torch.tensor([0.0, 0.0])}, {"w": torch.tensor([3.0, 4.0])}
    reached = {"w": torch.tensor([3.0, 0.0])}
    assert distance_between("l2", reached, start, target) == pytest.approx(16 / 25)
    assert distance_between("cosine", reached, start, target).item() == pytest.approx(1 - 9 / 15)
    with pytest.raises(UserError, match="not one of quotient, l2, cosine"):
        distance_between("l3", reached, start, target)


def test_the_quotient_distance_by_hand() -> None:
    start, target = {"w": torch.zeros(2, 2)}, {"w": torch.tensor([[3.0, 1.0], [1.0, 1.0]])}
    reached = {"w": torch.tensor([[1.0, 5.0], [0.0, 5.0]])}
    shifts = Invariances({"w": 1})
    # Without the mean row, the target is [[1, 0], [-1, 0]] and [[0.5, 0], [-0.5, 0]] is reached.
    assert distance_between("quotient", reached, start, target, shifts) == pytest.approx(0.25)
    assert distance_between("quotient", reached, start, target) == distance_between("l2", reached, start, target)


def test_the_quotient_distance_scales_the_gradient_of_a_segment() -> None:
    model, start, target, x, y = problem("convnet", torch.float64)
    plain, quotient = (matching_gradient(model, start, target, x, y, 0.3, 5, distance=d) for d in ("l2", "quotient"))
    way = {name: target[name] - start[name] for name in target}
    left = 1 - sum(find_invariances(model, (3, 8, 8)).shares(way).values())
    assert float(plain[0]) == pytest.approx(1 - left + left * float(quotient[0]))
    for one, other in zip(plain[1:], quotient[1:], strict=True):
        torch.testing.assert_close(one, left * other)


def test_equal_rates_are_a_single_rate_and_their_number_must_fit() -> None:
    model, start, target, x, y = problem("convnet", torch.float64)
    single = matching_gradient(model, start, target, x, y, 0.3, 5)
    equal = matching_gradient(model, start, target, x, y, torch.full((len(start),), 0.3), 5)
    for one, other in zip(single[:3], equal[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert float(equal[3].sum()) == pytest.approx(float(single[3]), rel=1e-6)
    with pytest.raises(UserError, match="2 inner rates for"):
        matching_gradient(model, start, target, x, y, torch.ones(2), 1)


def test_batch_statistics_are_refused() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    params = dict(model.named_parameters())
    with pytest.raises(UserError, match="BatchNorm"):
        matching_gradient(model, params, params, torch.zeros(2, 7), torch.zeros(2, 5), 0.1, 1)


MEMORY = """
import re, sys, torch
from dynafed.models import ConvNetSettings, convnet
from dynafed.synthesis import matching_gradient
torch.set_num_threads(1)
torch.manual_seed(0)
model = convnet((3, 32, 32), 10, ConvNetSettings(width=16))
start = {name: tensor.detach() for name, tensor in model.named_parameters()}
target = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in start.items()}
x, y = torch.randn(40, 3, 32, 32), torch.randn(40, 10)
def read(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = read("VmRSS")
matching_gradient(model, start, target, x, y, 0.01, int(sys.argv[1]))
snapshots = int(sys.argv[1]) * sum(tensor.numel() * 4 for tensor in start.values()) // 1024
print(read("VmHWM") - before - snapshots)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_flat_in_the_number_of_inner_steps() -> None:
    # Every large tensor gets pages of its own, so that the peak is what is alive, not what the allocator keeps.
    exact = os.environ | {"MALLOC_MMAP_THRESHOLD_": "16384", "OMP_NUM_THREADS": "1"}
    few, many = (
        int(subprocess.run([sys.executable, "-c", MEMORY, n], capture_output=True, check=True, env=exact).stdout)
        for n in ("4", "64")
    )
    assert few > 10_000, "the measurement sees what one step needs"
    assert many < 1.2 * few


@pytest.mark.parametrize("operation", OPERATIONS)
def test_augmentations_keep_shapes_and_differ_by_sample_and_key(operation: str) -> None:
    x = torch.randn(6, 3, 16, 16, requires_grad=True)
    one, same, other = (_APPLY[operation](x, Seeds(0).rng("k", number)) for number in (1, 1, 2))
    assert one.shape == x.shape
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    (grad,) = torch.autograd.grad(one.square().sum(), x)
    assert torch.isfinite(grad).all()
    assert grad.abs().sum() > 0


def test_augmentations_by_hand() -> None:
    x = torch.arange(2 * 8 * 8, dtype=torch.float32).reshape(2, 1, 8, 8) + 1
    flipped = _APPLY["flip"](x, Seeds(0).rng("k"))
    assert all(torch.equal(a, b) or torch.equal(a, b.flip(2)) for a, b in zip(flipped, x, strict=True))
    hidden = (_APPLY["cutout"](x, Seeds(0).rng("k")) == 0).flatten(1).sum(1)
    assert ((hidden > 0) & (hidden <= 25)).all()
    rows = torch.randn(3, 5)
    assert augment(rows, Seeds(0).rng("k")) is rows
    shifted = _APPLY["crop"](x, Seeds(0).rng("k"))
    assert set(shifted.unique().tolist()) <= {0.0, *x.unique().tolist()}

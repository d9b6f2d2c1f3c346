"""How far training on synthetic samples lands from where it should, and the exact gradient of that, in flat memory.

The inner loop takes `steps` of gradient descent on the whole synthetic set: th_(i+1) = th_i - lr * g(th_i, x, y).
Its gradient needs no unrolled graph. With lam = d(distance)/d(th_steps), go back step by step:

    dlr -= <g, lam>      dx -= lr * d<g, lam>/dx      dy -= lr * d<g, lam>/dy      lam -= lr * H lam

where all three derivatives of <g, lam> come from one Hessian-vector product. Only the parameters of each step and their
gradient are kept, and every term is a sum over samples, so the set can be taken in chunks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dynafed.errors import UserError
from dynafed.kernels.ops import weight_gradients_known
from dynafed.path import cores, one_thread, portion
from dynafed.tree import Tree

Augment = Callable[[Tensor, int], Tensor]
"""Changes a batch, differentiably; the same (batch, inner step) gives the same result."""

DISTANCES = ("l2", "cosine")


def soft_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with label distributions, summed over classes and over samples."""
    return -(labels * F.log_softmax(logits, dim=1)).sum()


def distance_between(kind: str, reached: Tree, start: Tree, target: Tree) -> Tensor:
    """`l2`: squared distance to the target over that from start to target. `cosine`: 1 - cos(reached, target)."""
    if kind == "l2":
        return _squared(reached, target) / _squared(start, target)
    if kind == "cosine":
        dot = sum((reached[name] * target[name]).sum() for name in target)
        norms = [sum(tensor.square().sum() for tensor in tree.values()) for tree in (reached, target)]
        return 1 - dot / (norms[0] * norms[1]) ** 0.5
    raise UserError(f"distance = '{kind}' is not one of {', '.join(DISTANCES)}")


def _squared(a: Tree, b: Tree) -> Tensor:
    return sum((a[name] - b[name]).square().sum() for name in b)  # type: ignore[return-value]


@dataclass(frozen=True)
class Inner:
    """The inner training problem: a network and a synthetic set, whose gradient is a mean over the set's samples."""

    models: Iterable[nn.Module]
    """The network for each chunk. Those that are differentiated at the same time must not share one."""
    labels: Tensor
    """Label distributions."""
    scale: float
    """The loss's factor: 1 / samples, or less where the loss is also averaged over classes."""
    chunk: int
    """Samples that are differentiated at a time."""
    each: Callable[..., Iterable[Any]] = map
    """Applies a function to the chunks; the results come in their order."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """What stands in the place of the network's own buffers."""

    def loss(self, model: nn.Module, params: Tree, x: Tensor, labels: Tensor) -> Tensor:
        """A chunk's share of the loss."""
        return soft_cross_entropy(functional_call(model, {**self.buffers, **params}, (x,)), labels) * self.scale

    def gradient(self, params: Tree, x: Tensor) -> Tree:
        """The loss's gradient with respect to the parameters."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}

        def one(model: nn.Module, part: Tensor, labels: Tensor) -> Sequence[Tensor]:
            return torch.autograd.grad(self.loss(model, leaves, part, labels), list(leaves.values()))

        return dict(zip(params, map(_total, zip(*self._each_chunk(one, x), strict=True)), strict=True))

    def step(self, params: Tree, x: Tensor, rate: float) -> tuple[Tree, Tree]:
        """The parameters after one step of gradient descent, and the gradient."""
        grads = self.gradient(params, x)
        return {name: tensor - rate * grads[name] for name, tensor in params.items()}, grads

    def _each_chunk(self, function: Callable[..., Sequence[Tensor]], x: Tensor) -> Iterable[Sequence[Tensor]]:
        return self.each(function, self.models, torch.split(x, self.chunk), torch.split(self.labels, self.chunk))

    def product(self, params: Tree, x: Tensor, direction: Tree) -> tuple[Tree, Tensor, Tensor]:
        """The derivatives of <g, direction> with respect to the parameters, the samples and the labels."""

        def one(model: nn.Module, part: Tensor, labels: Tensor) -> Sequence[Tensor]:
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
            part, labels = part.detach().requires_grad_(), labels.detach().requires_grad_()
            loss = self.loss(model, leaves, part, labels)
            with weight_gradients_known():
                grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
            wanted, along = [*leaves.values(), part, labels], [direction[name] for name in leaves]
            # Some derivatives can be absent: those of a purely linear part of the network, for instance.
            return torch.autograd.grad(grads, wanted, along, materialize_grads=True)

        *hessian, by_x, by_labels = zip(*self._each_chunk(one, x), strict=True)
        return dict(zip(params, map(_total, hessian), strict=True)), torch.cat(by_x), torch.cat(by_labels)


@contextlib.contextmanager
def inner_problem(model: nn.Module, labels: Tensor, scale: float, chunk: int = 0, threads: int = 0) -> Iterator[Inner]:
    """An inner problem whose chunks are shared among threads, if there are several; their number changes no bit."""
    chunk = chunk or portion(model, len(labels))
    parts = -(-len(labels) // chunk)
    if parts == 1 or labels.device.type != "cpu":
        yield Inner(itertools.repeat(model), labels, scale, chunk)
        return
    with one_thread(), ThreadPoolExecutor(threads or cores()) as pool:
        yield Inner([copy.deepcopy(model) for _ in range(parts)], labels, scale, chunk, pool.map)


def _total(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def matching_gradient(
    model: nn.Module,
    start: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    lr: float | Tensor,
    steps: int,
    *,
    distance: str = "l2",
    augment: Augment | None = None,
    loss_scale: float = 1.0,
    chunk: int = 0,
    threads: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train from `start` for `steps` steps on (x, softmax(y)) and measure the distance to `target`.

    Returns the distance and its exact gradients with respect to the samples, the label logits and the inner rate.
    `start` and `target` are named parameters; the loss is soft-label cross-entropy, summed over classes, averaged over
    samples, times `loss_scale`. The model must treat samples independently and have no in-place state;
    `chunk` of them are taken at a time, in `threads` threads (0: one a core), whose number changes no bit.
    """
    refuse_batch_state(model)
    device = x.device
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    start = {name: start[name].detach().to(device) for name in names}
    target = {name: target[name].detach().to(device) for name in names}
    x, y = x.detach(), y.detach()
    with inner_problem(model, y.softmax(dim=1), loss_scale / len(x), chunk, threads) as inner:
        apart, dx, dlabels, dlr = _there_and_back(inner, start, target, x, float(lr), steps, distance, augment)
    with torch.enable_grad():
        logits = y.requires_grad_()
        (dy,) = torch.autograd.grad(logits.softmax(dim=1), logits, dlabels)
    return apart, dx, dy, dlr


def _there_and_back(
    inner: Inner,
    start: Tree,
    target: Tree,
    x: Tensor,
    rate: float,
    steps: int,
    distance: str,
    augment: Augment | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The distance, and its gradients with respect to the samples, the label distributions and the inner rate."""

    def seen(batch: Tensor, step: int) -> Tensor:
        return batch if augment is None else augment(batch, step)

    # In one piece each: many small tensors that stay would leave holes between the large ones that come and go.
    paths = [{name: tensor.new_empty(steps, *tensor.shape) for name, tensor in start.items()} for _ in range(2)]
    params = start
    for step in range(steps):
        with torch.no_grad():
            batch = seen(x, step)
        after, grads = inner.step(params, batch, rate)
        for path, now in zip(paths, (params, grads), strict=True):
            for name, tensor in now.items():
                path[name][step] = tensor
        params = after

    reached = {name: tensor.requires_grad_() for name, tensor in params.items()}
    apart = distance_between(distance, reached, start, target)
    lam = dict(zip(reached, torch.autograd.grad(apart, list(reached.values())), strict=True))
    dx, dlabels, dlr = torch.zeros_like(x), torch.zeros_like(inner.labels), x.new_zeros(())
    for step in reversed(range(steps)):
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            batch = seen(leaf, step)
        params, grads = ({name: kept[step] for name, kept in path.items()} for path in paths)
        hessian, by_x, by_labels = inner.product(params, batch, lam)
        if augment is not None:
            (by_x,) = torch.autograd.grad(batch, leaf, by_x)
        dx -= rate * by_x
        dlabels -= rate * by_labels
        dlr -= _total((grads[name] * lam[name]).sum() for name in lam)
        lam = {name: lam[name] - rate * hessian[name] for name in lam}
    return apart.detach(), dx, dlabels, dlr


def refuse_batch_state(model: nn.Module) -> None:
    """Say clearly that a network with batch statistics can't be matched."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"'{name}' is a BatchNorm layer: its output depends on the whole batch and its buffers change in "
                "training, which trajectory matching can't use; take GroupNorm (norm = 'instance')"
            )

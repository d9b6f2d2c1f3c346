"""The matching loss (distance from the parameters after training on synthetic data to a target) and its exact gradient.

The inner loop takes `steps` full-batch gradient steps on the synthetic data: th_(i+1) = th_i - lr * g(th_i, x, y).
Its gradient needs no unrolled graph. With lam = d(loss)/d(th_steps), the adjoint runs backward over the steps:

    dlr -= <g, lam>      dx -= lr * d<g, lam>/dx      dy -= lr * d<g, lam>/dy      lam -= lr * H lam

where all three derivatives of <g, lam> come from one Hessian-vector product. With one rate for each parameter tensor (R
instead of lr), the product takes R lam, and the derivative of each rate is its own sum of -<g, lam>.
Only the parameters and the gradient of each step are stored (and what lay between the layers, given memory).
Every term is a sum over samples, so the samples can be processed in chunks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dynafed.config import kept_bytes
from dynafed.errors import UserError
from dynafed.execution import available_cores, chunk_size, known_weight_gradients, single_thread, whole_network
from dynafed.synthesis.invariances import Invariances, find_invariances
from dynafed.synthesis.settings import DISTANCES
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.kernels import ConvNet

Augment = Callable[[Tensor, int], Tensor]
"""Maps (batch, inner step) to a batch, differentiably and deterministically."""


def soft_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with label distributions, summed over classes and over samples."""
    return -(labels * F.log_softmax(logits, dim=1)).sum()


def distance_between(
    kind: str, reached: Tree, start: Tree, target: Tree, invariances: Invariances | None = None
) -> Tensor:
    """The distance from `reached` to `target`.

    `l2`: the squared distance over that from start to target. `quotient`: the same without the components along the
    network's invariances. `cosine`: 1 - cos(reached, target).
    """
    if kind in ("quotient", "l2"):
        project = invariances.project if invariances and kind == "quotient" else dict
        return _squared(project(_difference(reached, target))) / _squared(project(_difference(start, target)))
    if kind == "cosine":
        dot = sum((reached[name] * target[name]).sum() for name in target)
        return 1 - dot / (_squared(reached) * _squared(target)) ** 0.5
    raise UserError(f"distance = '{kind}' is not one of {', '.join(DISTANCES)}")


def _difference(a: Tree, b: Tree) -> Tree:
    return {name: a[name] - b[name] for name in b}


def _squared(values: Tree) -> Tensor:
    return sum(tensor.square().sum() for tensor in values.values())  # type: ignore[return-value]


Kept = list[Tensor]
"""For each chunk, what its gradient leaves to the Hessian product."""


@dataclass(frozen=True)
class InnerProblem:
    """The inner training problem: a network and labels of the synthetic samples; gradients are summed over chunks."""

    models: Iterable[nn.Module]
    """The network for each chunk; chunks that are processed concurrently need networks of their own."""
    labels: Tensor
    """Label distributions, shape (N, classes)."""
    scale: float
    """Factor of the loss: 1 / samples, times 1 / classes if the loss is also averaged over classes."""
    chunk: int
    """Samples per chunk."""
    map_chunks: Callable[..., Iterable[Any]] = map
    """Applies a function to the chunks and returns the results in order."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """Replace the network's own buffers."""

    def loss(self, model: nn.Module, params: Tree, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of one chunk."""
        return soft_cross_entropy(functional_call(model, {**self.buffers, **params}, (x,)), labels) * self.scale

    def gradient(self, params: Tree, x: Tensor, kept: Kept | None = None) -> Tree:
        """The gradient of the loss with respect to the parameters; fills what is to be `kept`."""

        def chunk_gradient(model: nn.Module, part: Tensor, labels: Tensor, kept: Tensor | None) -> Sequence[Tensor]:
            if whole := self._whole(model, params, part):
                return whole.gradient(params, part, labels, self.scale, kept)
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
            return torch.autograd.grad(self.loss(model, leaves, part, labels), list(leaves.values()))

        found = zip(*self._over_chunks(chunk_gradient, x, kept), strict=True)
        return dict(zip(params, map(_sum, found), strict=True))

    def step(self, params: Tree, x: Tensor, rates: Mapping[str, float], kept: Kept | None = None) -> tuple[Tree, Tree]:
        """The parameters after one step of gradient descent with a rate for each tensor, and the gradient."""
        grads = self.gradient(params, x, kept)
        return {name: tensor - rates[name] * grads[name] for name, tensor in params.items()}, grads

    def _over_chunks(
        self, function: Callable[..., Sequence[Tensor]], x: Tensor, kept: Kept | None
    ) -> Iterable[Sequence[Tensor]]:
        parts = torch.split(x, self.chunk), torch.split(self.labels, self.chunk)
        return self.map_chunks(function, self.models, *parts, kept or [None] * len(parts[0]))

    def _whole(self, model: nn.Module, params: Tree, x: Tensor) -> ConvNet | None:
        """The kernel for all of the network, if it fits."""
        found = None if self.buffers.keys() - params.keys() else whole_network(model)
        return found if found is not None and found.fits(params, x) else None

    def room(self, params: Tree, x: Tensor, steps: int) -> list[Kept | None]:
        """For each of these steps, what may be kept of it: of as many of the last as `kept_bytes` allows."""
        budget, whole = kept_bytes(), self._whole(next(iter(self.models)), params, x)
        if not budget or whole is None:
            return [None] * steps
        sizes = [whole.room(part, self.labels.shape[1]) for part in torch.split(x, self.chunk)]
        count = min(steps, budget // (sum(sizes) * x.itemsize))
        kept: list[Kept | None] = [[x.new_empty(size) for size in sizes] for _ in range(count)]
        return [None] * (steps - count) + kept

    def hessian_vector_product(
        self, params: Tree, x: Tensor, direction: Tree, kept: Kept | None = None
    ) -> tuple[Tree, Tensor, Tensor]:
        """The gradients of <g, direction> with respect to the parameters, the samples and the labels.

        What was `kept` when the gradient was computed isn't computed again.
        """

        def chunk_product(model: nn.Module, part: Tensor, labels: Tensor, kept: Tensor | None) -> Sequence[Tensor]:
            if whole := self._whole(model, params, part):
                return whole.product(params, direction, part, labels, self.scale, kept)
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
            part, labels = part.detach().requires_grad_(), labels.detach().requires_grad_()
            loss = self.loss(model, leaves, part, labels)
            with known_weight_gradients():
                grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
            inputs, along = [*leaves.values(), part, labels], [direction[name] for name in leaves]
            # Some derivatives don't exist, such as those of a linear part of the network.
            return torch.autograd.grad(grads, inputs, along, materialize_grads=True)

        *hessian, by_x, by_labels = zip(*self._over_chunks(chunk_product, x, kept), strict=True)
        return dict(zip(params, map(_sum, hessian), strict=True)), torch.cat(by_x), torch.cat(by_labels)


@contextlib.contextmanager
def inner_problem(
    model: nn.Module, labels: Tensor, scale: float, chunk: int = 0, threads: int = 0
) -> Iterator[InnerProblem]:
    """An inner problem whose chunks run in a pool of threads (0: one per core); their number changes no bit."""
    chunk = chunk or chunk_size(model, len(labels))
    chunks = -(-len(labels) // chunk)
    if chunks == 1 or labels.device.type != "cpu":
        yield InnerProblem(itertools.repeat(model), labels, scale, chunk)
        return
    with single_thread(), ThreadPoolExecutor(threads or available_cores()) as pool:
        yield InnerProblem([copy.deepcopy(model) for _ in range(chunks)], labels, scale, chunk, pool.map)


def rates_by_name(lr: float | Tensor, names: Collection[str]) -> dict[str, float]:
    """The inner rate of each parameter tensor: `lr` holds one for all, or one for each in their order."""
    values = lr.tolist() if isinstance(lr, Tensor) else lr
    if not isinstance(values, list):
        return dict.fromkeys(names, float(values))
    if len(values) != len(names):
        raise UserError(f"there are {len(values)} inner rates for {len(names)} parameter tensors: one for each, or one")
    return dict(zip(names, values, strict=True))


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)


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
    invariances: Invariances | None = None,
    augment: Augment | None = None,
    loss_scale: float = 1.0,
    chunk: int = 0,
    threads: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The matching loss after `steps` gradient steps from `start` on (x, softmax(y)), and its exact gradients.

    Returns (loss, dx, dy, dlr): gradients with respect to the samples, the label logits and the inner learning rate.
    `lr` is a number, or a vector: one rate for each trainable parameter tensor, in the model's order, as in `dlr`.
    `distance` is one of `DISTANCES`; for `quotient`, the model's `invariances` are found if they aren't given.
    `start` and `target` are named parameters. The inner loss is soft-label cross-entropy, summed over classes, averaged
    over samples, times `loss_scale`. The model must treat samples independently and have no in-place state; `chunk`
    samples are processed at a time, in `threads` threads (0: one per core), whose number changes no bit.
    """
    reject_batch_norm(model)
    device = x.device
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    start = {name: start[name].detach().to(device) for name in names}
    target = {name: target[name].detach().to(device) for name in names}
    x, y = x.detach(), y.detach()
    if distance == "quotient" and invariances is None:
        invariances = find_invariances(model, tuple(x.shape[1:]))
    with inner_problem(model, y.softmax(dim=1), loss_scale / len(x), chunk, threads) as inner:
        loss, dx, dlabels, dlr = unroll_and_adjoint(
            inner,
            start,
            x,
            lr,
            steps,
            lambda reached: distance_between(distance, reached, start, target, invariances),
            augment,
        )
    with torch.enable_grad():
        logits = y.requires_grad_()
        (dy,) = torch.autograd.grad(logits.softmax(dim=1), logits, dlabels)
    return loss, dx, dy, dlr


def unroll_and_adjoint(
    inner: InnerProblem,
    start: Tree,
    x: Tensor,
    lr: float | Tensor,
    steps: int,
    loss_of: Callable[[Tree], Tensor],
    augment: Augment | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the inner steps forward and their adjoint backward.

    Returns the loss of the last parameters and its gradients with respect to the samples, the label distributions and
    the inner rate or rates.
    """

    def augmented(batch: Tensor, step: int) -> Tensor:
        return batch if augment is None else augment(batch, step)

    each = isinstance(lr, Tensor) and lr.ndim > 0
    # A single rate is a factor of the product; several scale its direction.
    rates, factor = rates_by_name(lr, start), 1.0 if each else float(lr)
    # One allocation per parameter: many small ones that live long would fragment the heap.
    history = [{name: tensor.new_empty(steps, *tensor.shape) for name, tensor in start.items()} for _ in range(2)]
    params = start
    kept = inner.room(start, x, steps)
    for step in range(steps):
        with torch.no_grad():
            batch = augmented(x, step)
        after, grads = inner.step(params, batch, rates, kept[step])
        for stored, current in zip(history, (params, grads), strict=True):
            for name, tensor in current.items():
                stored[name][step] = tensor
        params = after

    reached = {name: tensor.requires_grad_() for name, tensor in params.items()}
    loss = loss_of(reached)
    lam = dict(zip(reached, torch.autograd.grad(loss, list(reached.values()), materialize_grads=True), strict=True))
    dx, dlabels = torch.zeros_like(x), torch.zeros_like(inner.labels)
    dlr = x.new_zeros(len(start) if each else ())
    for step in reversed(range(steps)):
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            batch = augmented(leaf, step)
        params, grads = ({name: values[step] for name, values in stored.items()} for stored in history)
        direction = {name: rates[name] * tensor for name, tensor in lam.items()} if each else lam
        hessian, by_x, by_labels = inner.hessian_vector_product(params, batch, direction, kept.pop())
        if augment is not None:
            (by_x,) = torch.autograd.grad(batch, leaf, by_x)
        dx -= factor * by_x
        dlabels -= factor * by_labels
        dots = [(grads[name] * lam[name]).sum() for name in lam]
        dlr -= torch.stack(dots) if each else _sum(dots)
        lam = {name: lam[name] - factor * hessian[name] for name in lam}
    return loss.detach(), dx, dlabels, dlr


def reject_batch_norm(model: nn.Module) -> None:
    """Raise `UserError` if the network has batch statistics, which trajectory matching can't use."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"'{name}' is a BatchNorm layer: its output depends on the whole batch and its buffers change in "
                "training, which trajectory matching can't use; take GroupNorm (norm = 'instance')"
            )

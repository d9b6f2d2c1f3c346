"""What a client computes in a step: the loss and the corrected gradient, replayed from a trace where there is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from dynafed import optim, tree
from dynafed.engine.federation import ClientSide
from dynafed.execution import TrainEpoch, fused_epoch, fused_features, whole_network
from dynafed.methods import AffineCorrection, ClientContext, Method
from dynafed.optim import Optimizer, inference
from dynafed.tracing import Function
from dynafed.tree import Tree

TREES = ("global_params", "global_buffers", "extras", "state", "prepared", "sampled")
"""The parts of a `ClientContext` that are trees."""


class LocalSteps:
    """The loss and the corrected gradients of one client's batches, and the steps that its optimizer takes by them."""

    @classmethod
    def of(
        cls, side: ClientSide, params: Tree, contexts: Mapping[str, ClientContext], optimizer: Optimizer
    ) -> TrainEpoch:
        """What trains a client's `params` in place: our kernel, where that does the same, or the methods' gradient."""
        steps = FusedSteps if side.execution.fused_epochs else cls
        return steps(side, params, contexts, optimizer).epoch

    def __init__(
        self, side: ClientSide, params: Tree, contexts: Mapping[str, ClientContext], optimizer: Optimizer
    ) -> None:
        self.problem, self.params, self.contexts, self.optimizer = side.problem, params, contexts, optimizer
        self.methods = [method for method in side.methods.clients if not method.uses_fedavg_steps()]
        loss = side.methods.loss
        self.loss = loss if loss in self.methods else Method(side.config)
        self.loss_name = loss.name
        plain = side.config.loss == "cross_entropy" and not self.loss.overrides("loss")
        self.whole = whole_network(self.problem.network) if plain else None
        """The kernel for the gradient of a whole network, if there is one."""
        self.samples = loss in self.methods and loss.overrides("sample_step")
        self.corrections = [method for method in self.methods if method.corrects_gradients()]
        trees = {name: {part: getattr(each, part) for part in TREES} for name, each in contexts.items()}
        self.context = tree.sorted_by_name(tree.nest({name: tree.nest(parts) for name, parts in trees.items()}))
        self.tensors = (*params.values(), *self.context.values())
        self.layout = tuple((name, tensor.shape, tensor.dtype) for name, tensor in self.context.items())
        self.traces: dict[Any, Function] = {}

    def epoch(self, x: Tensor, y: Tensor, order: np.ndarray, batch_size: int) -> Tensor:
        """Take a step for each batch of the samples in this order; returns the losses before each."""
        return torch.stack([self.step(*batch) for batch in optim.split_batches((x, y), order, batch_size)])

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Change `params` by a batch; returns the loss before."""
        sampled = self.loss.sample_step(len(y), self.contexts[self.loss_name]) if self.samples else {}
        sampled = tree.sorted_by_name(sampled)
        key = x.shape, *sampled
        inputs = (x, y, *self.tensors, *sampled.values())
        traced = self.traces.get(key) or self._trace(key, tuple(sampled), inputs)
        if traced is None:
            contexts = dict(self.contexts)
            if sampled:
                contexts[self.loss_name] = dataclasses.replace(contexts[self.loss_name], sampled=sampled)
            found = self._compute(x, y, self.params, contexts)
        # The gradients are freed at once, so that the next ones take their memory, still in the cache.
        with inference(True):
            loss, *grads = traced(*inputs) if traced else found
            self.optimizer.step_kernel_layout(grads)
        return loss

    def _compute(self, x: Tensor, y: Tensor, params: Tree, contexts: Mapping[str, ClientContext]) -> Sequence[Tensor]:
        """The loss, and each parameter's gradient in the optimizer's layout: in a trace, the layout is free."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        if self.whole is not None and self.whole.fits(params, x):
            loss, found = self.whole.loss_gradient(params, x, y)
        else:
            loss = self.loss.loss(leaves, x, y, contexts[self.loss_name])
            found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        with torch.no_grad():
            grads = dict(zip(leaves, found, strict=True))
            for method in self.corrections:
                grads = method.correct_gradients(grads, leaves, contexts[method.name])
            return [loss.detach(), *self.optimizer.kernel_layout([grads[name] for name in leaves])]

    def _trace(self, key: Any, sampled: tuple[str, ...], inputs: Sequence[Tensor]) -> Function | None:
        names = [*self.params, *self.context, *(f"{self.loss_name}/sampled/{name}" for name in sampled)]

        def function(x: Tensor, y: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
            """The same, of nothing but tensors: a method that looks at anything else can't be traced."""
            named = dict(zip(names, tensors, strict=True))
            found = tree.unnest(tree.without(named, self.params))
            contexts = {name: self._tensors_only(tree.unnest(found.get(name, {}))) for name in self.contexts}
            return self._compute(x, y, tree.only(named, self.params), contexts)

        traced = self.problem.tracer.trace((self.layout, *key), function, inputs)
        if traced is not None:
            self.traces[key] = traced
        return traced

    def _tensors_only(self, parts: dict[str, Tree]) -> ClientContext:
        """A context with these trees, in which everything else that differs from client to client is untraceable."""
        buffers = parts.get("global_buffers", {})
        known: dict[str, Any] = {
            "forward": lambda params, x: self.problem.forward(buffers | params, x),
            "features": lambda params, x: self.problem.features(buffers | params, x),
            "head": lambda params, z: self.problem.head(buffers | params, z),
            "task": self.problem.task,
        }
        untraceable = {field.name: Untraceable() for field in dataclasses.fields(ClientContext)}
        return ClientContext(**untraceable | known | {part: {} for part in TREES} | parts)


class FusedSteps:
    """The same of methods that declare what they do, an epoch in one call of our kernel."""

    def __init__(
        self, side: ClientSide, params: Tree, contexts: Mapping[str, ClientContext], optimizer: Optimizer
    ) -> None:
        names = side.problem.trainable
        active = [method for method in side.methods.clients if not method.uses_fedavg_steps()]
        corrections = (method.affine_correction(contexts[method.name]) for method in active)
        correction = sum(corrections, AffineCorrection())
        self.loss, self.context = side.methods.loss, contexts[side.methods.loss.name]
        fused = self.loss.fused_loss(self.context) if self.loss in active else None
        if fused and fused.models:
            models = ([model[name] for name in names] for model in fused.models)
            held = (fused_features(each, self.context.x, side.execution.activations) for each in models)
            fused = dataclasses.replace(fused, held=(*fused.held, *held))
        self.samples = fused is not None and self.loss.overrides("sample_step")
        reference, shift = (
            [part[name] for name in names] if part else () for part in (correction.reference, correction.shift)
        )
        self.train = fused_epoch(
            [params[name] for name in names],
            optimizer,
            scale=correction.scale,
            reference=reference,
            shift=shift,
            loss=fused,
            activations=side.execution.activations,
        )

    def epoch(self, x: Tensor, y: Tensor, order: np.ndarray, batch_size: int) -> Tensor:
        """Take a step for each batch of the samples in this order; returns the losses before each."""
        sizes = (min(batch_size, len(order) - start) for start in range(0, len(order), batch_size))
        drawn = [self.loss.sample_step(size, self.context) for size in sizes] if self.samples else ()
        return self.train(x, y, order, batch_size, drawn)


class Untraceable:
    """Stands for what differs from client to client and is no tensor: to look at it is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"'{name}' of something that a trace can't hold")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("compared with something that a trace can't hold")

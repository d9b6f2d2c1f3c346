"""What a client computes in a step: its method's loss and corrected gradient, from a recording where there is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from dynafed import optim, tree
from dynafed.engine.plan import Plan
from dynafed.kernels.mlp import MLPTraining
from dynafed.methods import Local, Method
from dynafed.optim import Optimizer, inference
from dynafed.record import Function
from dynafed.tree import Tree

CONTEXT = ("start", "buffers", "extras", "memory", "carry", "drawn")
"""The parts of `Local` that are trees."""


Training = Callable[[Tensor, Tensor, np.ndarray, int], Tensor]
"""Takes samples, labels, the order in which they are seen and the size of a batch; returns each step's loss."""


def training(plan: Plan, params: Tree, local: Local, optimizer: Optimizer) -> Training:
    """What changes a client's `params` step by step: our kernel, where that does the same, or the method's gradient."""
    if plan.path.epochs:
        return MLPTraining([params[name] for name in plan.trainable], optimizer)
    return Gradient(plan, params, local, optimizer).epoch


class Gradient:
    """The loss and the corrected gradients of one client's batches, and the steps that its optimiser takes by them."""

    def __init__(self, plan: Plan, params: Tree, local: Local, optimizer: Optimizer) -> None:
        self.plan, self.params, self.local, self.optimizer = plan, params, local, optimizer
        self.method = Method(plan.config) if plan.methods.client.plain() else plan.methods.client
        self.draws = self.method.overrides("draw")
        self.context = tree.by_name(tree.nest({part: getattr(local, part) for part in CONTEXT}))
        self.tensors = (*params.values(), *self.context.values())
        self.layout = tuple((name, tensor.shape, tensor.dtype) for name, tensor in self.context.items())
        self.tapes: dict[Any, Function] = {}

    def epoch(self, x: Tensor, y: Tensor, order: np.ndarray, batch: int) -> Tensor:
        """Take a step for each batch of the samples in this order; the losses before each."""
        return torch.stack([self.step(*some) for some in optim.split((x, y), order, batch)])

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Change `params` by a batch; the loss before."""
        drawn = tree.by_name(self.method.draw(len(y), self.local)) if self.draws else {}
        key = x.shape, *drawn
        inputs = (x, y, *self.tensors, *drawn.values())
        tape = self.tapes.get(key) or self._recorded(key, tuple(drawn), inputs)
        if tape is None:
            local = dataclasses.replace(self.local, drawn=drawn) if drawn else self.local
            found = self._computed(x, y, self.params, local)
        # The gradients go at once, so that the next ones lie where these did, still in the cache.
        with inference(True):
            loss, *grads = tape(*inputs) if tape else found
            self.optimizer.step_by(grads)
        return loss

    def _computed(self, x: Tensor, y: Tensor, params: Tree, local: Local) -> Sequence[Tensor]:
        """The loss, and the gradient of each parameter in order, as the optimiser takes it: recorded, that is free."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        loss = self.method.loss(leaves, x, y, local)
        found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        with torch.no_grad():
            grads = self.method.adjust(dict(zip(leaves, found, strict=True)), leaves, local)
            return [loss.detach(), *self.optimizer.as_they_lie([grads[name] for name in leaves])]

    def _recorded(self, key: Any, drawn: tuple[str, ...], inputs: Sequence[Tensor]) -> Function | None:
        names = [*self.params, *self.context, *(f"drawn/{name}" for name in drawn)]

        def function(x: Tensor, y: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
            """The same, of nothing but tensors: a method that looks at anything else can't be recorded."""
            named = dict(zip(names, tensors, strict=True))
            parts: dict[str, Any] = tree.unnest(tree.without(named, self.params))
            others: Tree = parts.get("buffers", {})
            unknown = {each.name: Unknown() for each in dataclasses.fields(Local)}
            known: dict[str, Any] = {
                "forward": lambda params, x: self.plan.forward(others | params, x),
                "features": lambda params, x: self.plan.features(others | params, x),
                "head": lambda params, z: self.plan.head(others | params, z),
            }
            local = Local(**unknown | known | {part: {} for part in CONTEXT} | parts)
            return self._computed(x, y, tree.only(named, self.params), local)

        tape = self.plan.recorder.tape((self.layout, *key), function, inputs)
        if tape is not None:
            self.tapes[key] = tape
        return tape


class Unknown:
    """Stands for what differs from client to client and is no tensor: to look at it is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"'{name}' of something that a recording can't hold")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("compared with something that a recording can't hold")

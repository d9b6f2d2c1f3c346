"""The parts of a training loop: the order of the batches, and optimisers by name whose moments are trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynafed.tree import Tree

inference: Any = getattr(torch._C, "_InferenceMode", torch.inference_mode)
"""What torch.inference_mode is made of, for where its Python counts: `with inference(True)`."""

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
ADAMS = ("adam", "adamw")
BETAS, EPS = (0.9, 0.999), 1e-8
"""Adam's."""


class Optimizer:
    """Changes tensors in place by their gradients: torch.optim's fused kernels, without the bookkeeping around them."""

    def __init__(
        self, name: str, params: Sequence[Tensor], lr: float, *, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        self.name, self.lr, self.weight_decay = name, lr, weight_decay
        self.momentum = momentum if name == "momentum" else 0.0
        # The fused kernels go through memory as it lies: a matrix that lies column by column is given transposed.
        self.turned = [_lies_by_columns(parameter) for parameter in params]
        self.params = self.as_they_lie([parameter.detach() for parameter in params])
        if any(own.data_ptr() != given.data_ptr() for own, given in zip(self.params, params, strict=True)):
            raise ValueError("every parameter must be contiguous, or its transpose")
        self.kept: dict[str, list[Tensor]] = {}
        if name in ADAMS:
            self.kept = {moment: [torch.zeros_like(p) for p in self.params] for moment in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), device=self.params[0].device)
            self.kept["step"] = [step] * len(self.params)  # one number, that all parameters share
            self.counter: Any = step.numpy() if step.device.type == "cpu" else step  # torch would take 10 us to add 1
        elif self.momentum:
            self.kept["momentum_buffer"] = [torch.zeros_like(p) for p in self.params]

    def step(self, grads: Sequence[Tensor]) -> None:
        """Change the parameters by their gradients, given in the same order."""
        with inference(True):
            self.step_by(self.as_they_lie(grads))

    def as_they_lie(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The parameters, or gradients in their order, as the kernels take them."""
        pairs = zip(tensors, self.turned, strict=True)
        return [(tensor.t() if turned else tensor).contiguous() for tensor, turned in pairs]

    def step_by(self, grads: list[Tensor]) -> None:
        """A step by gradients that have been through `as_they_lie`; to be called in inference mode."""
        if self.name in ADAMS:
            kernel = torch._fused_adam_ if self.name == "adam" else torch._fused_adamw_
            self.counter += 1
            kernel(
                self.params,
                grads,
                self.kept["exp_avg"],
                self.kept["exp_avg_sq"],
                [],
                self.kept["step"],
                lr=self.lr,
                beta1=BETAS[0],
                beta2=BETAS[1],
                weight_decay=self.weight_decay,
                eps=EPS,
                amsgrad=False,
                maximize=False,
            )
        else:
            torch._fused_sgd_(
                self.params,
                grads,
                self.kept.get("momentum_buffer", []),
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )

    def moments(self) -> Tree:
        """What it remembers, named `<parameter's number>.<moment>`."""
        return {
            f"{number}.{moment}": (tensor.t() if turned and tensor.ndim else tensor).clone()
            for moment, tensors in self.kept.items()
            for number, (tensor, turned) in enumerate(zip(tensors, self.turned, strict=True))
        }

    def restore(self, saved: Tree) -> None:
        """Take over what another one of the same kind remembered; nothing if there is nothing."""
        for key, value in saved.items():
            number, _, moment = key.partition(".")
            own = self.kept[moment][int(number)]
            value = value.t() if self.turned[int(number)] and value.ndim else value
            # Moments go by position, and would be spread over a parameter of another shape in silence.
            if value.shape != own.shape:
                raise ValueError(f"moment {key} has shape {tuple(value.shape)}: the parameters are in another order")
            own.copy_(value)


def _lies_by_columns(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous()


def orders(samples: int, size: int, steps: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Which samples are seen in batches of `size`: a fresh shuffle every epoch, whose last batch may be short."""
    while steps > 0:
        order = rng.permutation(samples)[: steps * size]
        steps -= -(-len(order) // size)
        yield order


def split(tensors: Sequence[Tensor], order: np.ndarray, size: int) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor in this order, in batches."""
    index = torch.from_numpy(order).to(tensors[0].device)
    return zip(*(torch.split(tensor.index_select(0, index), size) for tensor in tensors), strict=True)


def batches(tensors: Sequence[Tensor], size: int, steps: int, rng: np.random.Generator) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, step by step."""
    for order in orders(len(tensors[0]), size, steps, rng):
        yield from split(tensors, order, size)

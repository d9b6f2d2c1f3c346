"""The parts of a training loop: the order of the batches, and optimizers by name whose state is a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynafed.tree import Tree

inference: Any = getattr(torch._C, "_InferenceMode", torch.inference_mode)
"""What torch.inference_mode is made of, for where its Python counts: `with inference(True)`."""

ADAMS = ("adam", "adamw")
BETAS, EPS = (0.9, 0.999), 1e-8
"""Adam's."""


class Optimizer:
    """Updates tensors in place: torch.optim's fused kernels without the bookkeeping around them."""

    def __init__(
        self, name: str, params: Sequence[Tensor], lr: float, *, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        self.name, self.lr, self.weight_decay = name, lr, weight_decay
        self.momentum = momentum if name == "momentum" else 0.0
        # The fused kernels walk through memory in order: a column-major matrix is given transposed.
        self.transposed = [_is_column_major(parameter) for parameter in params]
        self.params = self.kernel_layout([parameter.detach() for parameter in params])
        if any(own.data_ptr() != given.data_ptr() for own, given in zip(self.params, params, strict=True)):
            raise ValueError("every parameter must be contiguous, or its transpose")
        self.moments: dict[str, list[Tensor]] = {}
        if name in ADAMS:
            self.moments = {moment: [torch.zeros_like(p) for p in self.params] for moment in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), device=self.params[0].device)
            self.moments["step"] = [step] * len(self.params)  # one number that all parameters share
            self.counter: Any = step.numpy() if step.device.type == "cpu" else step  # torch would take 10 us to add 1
        elif self.momentum:
            self.moments["momentum_buffer"] = [torch.zeros_like(p) for p in self.params]

    def step(self, grads: Sequence[Tensor]) -> None:
        """Change the parameters by their gradients, given in the same order."""
        with inference(True):
            self.step_kernel_layout(self.kernel_layout(grads))

    def kernel_layout(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The parameters, or gradients in their order, as the fused kernels take them: contiguous."""
        pairs = zip(tensors, self.transposed, strict=True)
        return [(tensor.t() if transposed else tensor).contiguous() for tensor, transposed in pairs]

    def step_kernel_layout(self, grads: list[Tensor]) -> None:
        """One step by gradients in `kernel_layout`. Called in inference mode."""
        if self.name in ADAMS:
            kernel = torch._fused_adam_ if self.name == "adam" else torch._fused_adamw_
            self.counter += 1
            kernel(
                self.params,
                grads,
                self.moments["exp_avg"],
                self.moments["exp_avg_sq"],
                [],
                self.moments["step"],
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
                self.moments.get("momentum_buffer", []),
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )

    def state(self) -> Tree:
        """A copy of the moments, named `<parameter's index>.<moment>`."""
        return {
            f"{index}.{moment}": (tensor.t() if transposed and tensor.ndim else tensor).clone()
            for moment, tensors in self.moments.items()
            for index, (tensor, transposed) in enumerate(zip(tensors, self.transposed, strict=True))
        }

    def load_state(self, saved: Tree) -> None:
        """Load what `state` of an optimizer of the same kind returned; an empty tree changes nothing."""
        for key, value in saved.items():
            index, _, moment = key.partition(".")
            own = self.moments[moment][int(index)]
            value = value.t() if self.transposed[int(index)] and value.ndim else value
            # Moments go by position, and would be spread over a parameter of another shape in silence.
            if value.shape != own.shape:
                raise ValueError(f"moment {key} has shape {tuple(value.shape)}: the parameters are in another order")
            own.copy_(value)


def _is_column_major(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous()


def epoch_orders(
    samples: int, size: int, steps: int, rng: np.random.Generator, *, pairs: bool = False
) -> Iterator[np.ndarray]:
    """Yields a fresh shuffle of the samples for each epoch, cut off after `steps` batches of `size` in all.

    With `pairs`, a last batch of one sample gets a second one: the first of the epoch, or itself if it is alone.
    """
    while steps > 0:
        order = rng.permutation(samples)[: steps * size]
        steps -= -(-len(order) // size)
        yield np.append(order, order[0]) if pairs and len(order) % size == 1 else order


def split_batches(tensors: Sequence[Tensor], order: np.ndarray, size: int) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor in this order, in batches."""
    index = torch.from_numpy(order).to(tensors[0].device)
    return zip(*(torch.split(tensor.index_select(0, index), size) for tensor in tensors), strict=True)


def batches(tensors: Sequence[Tensor], size: int, steps: int, rng: np.random.Generator) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, step by step."""
    for order in epoch_orders(len(tensors[0]), size, steps, rng):
        yield from split_batches(tensors, order, size)

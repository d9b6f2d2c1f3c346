"""The parts of a training loop: the order of the batches, optimisers by name, and their moments as trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from dynafed.tree import Tree

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")


def make(
    name: str, params: Sequence[Tensor], lr: float, *, momentum: float = 0.9, weight_decay: float = 0.0
) -> Optimizer:
    """A fresh optimiser over leaf tensors that are all on one device."""
    params = list(params)
    fused = params[0].device.type in ("cpu", "cuda")
    if name in ("sgd", "momentum"):
        momentum = momentum if name == "momentum" else 0.0
        return SGD(params, lr, momentum=momentum, weight_decay=weight_decay, fused=fused)
    kind: type[Adam] = {"adam": Adam, "adamw": AdamW}[name]
    return kind(params, lr, weight_decay=weight_decay, fused=fused)


def moments(optimizer: Optimizer) -> Tree:
    """What the optimiser remembers, named `<parameter's number>.<moment>`."""
    return {
        f"{number}.{name}": value.detach().clone()
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None
    }


def restore(optimizer: Optimizer, saved: Tree) -> None:
    """Give an optimiser of the same kind the moments that another one had."""
    state: dict[int, dict[str, Tensor]] = {}
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, value in saved.items():
        number, _, name = key.partition(".")
        # Moments go by position: over parameters in another order, the fused kernels would read beyond their ends.
        if value.ndim and value.shape != params[int(number)].shape:
            raise ValueError(f"moment {key} has shape {tuple(value.shape)}: the parameters are in another order")
        state.setdefault(int(number), {})[name] = value.clone()
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def batches(samples: int, size: int, steps: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Rows of each step: a fresh shuffle every epoch, whose last batch may be short, until the steps are done."""
    while True:
        order = rng.permutation(samples)
        for start in range(0, samples, size):
            if not steps:
                return
            steps -= 1
            yield order[start : start + size]

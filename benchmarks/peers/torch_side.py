"""What the sides written in PyTorch share: the network, the data as tensors, and an honest count of optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from peers.protocol import SAMPLES_FOR_LOSS, Task, Workload


def network(workload: Workload) -> nn.Module:
    """The workload's network, with the same layers as `dynafed.models` builds."""
    torch.manual_seed(0)
    layers: list[nn.Module]
    if workload.model == "mlp":
        sizes = [int(np.prod(workload.shape)), workload.width, workload.width]
        layers = [nn.Flatten()]
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        features = workload.width
    else:
        channels, side, _ = workload.shape
        layers = []
        for _ in range(3):
            layers += [
                nn.Conv2d(channels, workload.width, 3, padding=1),
                nn.GroupNorm(workload.width, workload.width),
                nn.ReLU(),
                nn.AvgPool2d(2),
            ]
            channels, side = workload.width, side // 2
        layers.append(nn.Flatten())
        features = channels * side * side
    return nn.Sequential(*layers, nn.Linear(features, workload.classes))


def tensors(task: Task) -> tuple[Tensor, Tensor]:
    """Samples and labels."""
    x, y = task.arrays()
    return torch.from_numpy(x), torch.from_numpy(y)


def parameters(module: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in module.parameters())


class Steps:
    """Counts the steps of every Adam optimizer in this process, whoever takes them."""

    def __init__(self) -> None:
        self.count = 0
        register_optimizer_step_post_hook(self._seen)

    def _seen(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.count += isinstance(optimizer, torch.optim.Adam)

    def take(self) -> int:
        """The steps since it was last asked."""
        count, self.count = self.count, 0
        return count


def loss_of(module: Callable[[], nn.Module], x: Tensor, y: Tensor) -> Callable[[], float]:
    """A function that measures the present global model."""

    @torch.no_grad()
    def measure() -> float:
        return float(F.cross_entropy(module()(x[:SAMPLES_FOR_LOSS]), y[:SAMPLES_FOR_LOSS]))

    return measure


def pretend_torchvision_ops() -> None:
    """Let torchvision be imported beside the CPU build of torch: its own compiled operators don't load there."""
    global _library
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_library: torch.library.Library | None = None

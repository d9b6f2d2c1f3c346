"""What the sides written in PyTorch share: the network, the data as tensors, and an honest count of optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from peers.protocol import SAMPLES_FOR_LOSS, Task, Turns, Workload


def network(workload: Workload) -> nn.Module:
    """The workload's network; MLP and ConvNet with the same layers as `dynafed.models` builds."""
    torch.manual_seed(0)
    if workload.model == "own":
        return own_network(workload)
    if workload.model == "resnet8":
        return ResNet8(workload)
    layers: list[nn.Module]
    if workload.model in ("mlp", "own mlp"):
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


def own_network(workload: Workload) -> nn.Module:
    """What a user may write down."""
    channels, side, _ = workload.shape
    layers: list[nn.Module] = []
    for width in (workload.width, 2 * workload.width, 2 * workload.width):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.MaxPool2d(2)]
        channels, side = width, side // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, workload.classes))


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(8, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet8(nn.Module):
    """Three residual blocks, as it is usually written."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        width = workload.width
        self.conv = nn.Conv2d(workload.shape[0], width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, width)
        self.blocks = nn.Sequential(
            Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, workload.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def tensors(task: Task) -> tuple[Tensor, Tensor]:
    """Samples and labels."""
    x, y = task.arrays()
    return torch.from_numpy(x), torch.from_numpy(y)


def parameters(module: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in module.parameters())


class Steps:
    """Counts the steps of every optimizer in this process, whoever takes them; but for the server's, if it has one."""

    def __init__(self) -> None:
        self.count = 0
        self.server: torch.optim.Optimizer | None = None
        register_optimizer_step_post_hook(self._seen)

    def _seen(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.count += optimizer is not self.server

    def take(self) -> int:
        """The steps since it was last asked."""
        count, self.count = self.count, 0
        return count


OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def judge(turns: Turns, module: Callable[[], nn.Module], x: Tensor, y: Tensor) -> None:
    """Let the present global model be measured: its loss on some samples; if there are test samples, its accuracy."""

    @torch.no_grad()
    def loss() -> float:
        return float(F.cross_entropy(module()(x[:SAMPLES_FOR_LOSS]), y[:SAMPLES_FOR_LOSS]))

    turns.loss = loss
    if (test := turns.task.test_arrays()) is None:
        return
    samples, labels = map(torch.from_numpy, test)

    @torch.no_grad()
    def accuracy() -> float:
        parts = zip(samples.split(SAMPLES_FOR_LOSS), labels.split(SAMPLES_FOR_LOSS), strict=True)
        return sum(int((module()(some).argmax(1) == wanted).sum()) for some, wanted in parts) / len(labels)

    turns.accuracy = accuracy


def pretend_torchvision_ops() -> None:
    """Let torchvision be imported beside the CPU build of torch: its own compiled operators don't load there."""
    global _library
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_library: torch.library.Library | None = None

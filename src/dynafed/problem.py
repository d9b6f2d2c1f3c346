"""What server and clients agree on before round 1: shapes, classes, the network, the seeds. It holds no data."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dynafed import tree
from dynafed.kernels import ConvNet
from dynafed.seeds import Seeds
from dynafed.tasks import CROSS_ENTROPY, Task
from dynafed.tracing import StepTracer
from dynafed.tree import Tree

CPU = torch.device("cpu")

BATCH = 1000
"""Samples in a forward pass without gradients."""


@dataclass(frozen=True)
class Problem:
    """What is to be learned and the network that learns it. Every function takes the weights as a tree."""

    shape: tuple[int, ...]
    """Of one sample."""
    classes: int
    clients: int
    """How many there are in all."""
    model: nn.Module
    """The network as it was built. It names the parameters and gives the initial weights."""
    network: nn.Module
    """What computes: the model itself, or the same network on accelerated parts."""
    seeds: Seeds
    device: torch.device = CPU
    """Where the arithmetic happens; messages and states stay on the CPU."""
    tracer: StepTracer = field(default_factory=lambda: StepTracer(on=False))
    """Traced training steps of this process."""
    task: Task = CROSS_ENTROPY
    """The loss, and what it is for."""
    pairs: bool = False
    """Whether the network can't be trained on a batch of one sample, as BatchNorm can't."""
    fused: bool = False
    """Whether kernels take many steps in one call (`ExecutionPlan.fused_epochs`), clients' and, if they can, others."""

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """The names of the parameters that have gradients; the others are buffers or frozen."""
        return tuple(name for name, parameter in self.model.named_parameters() if parameter.requires_grad)

    @cached_property
    def column_major(self) -> frozenset[str]:
        """The weights of linear layers: stored column by column, they multiply a small batch faster on a CPU."""
        return frozenset(
            f"{name}.weight".removeprefix(".")
            for name, module in self.model.named_modules()
            if type(module) is nn.Linear and self.device.type == "cpu"
        )

    def to_device(self, weights: Tree) -> Tree:
        """The weights on the device, in the layout in which they are trained."""
        return tree.column_major(tree.to(weights, self.device), self.column_major)

    def initial_model(self) -> Tree:
        """The global model before round 1: parameters and persistent buffers by name."""
        persistent = self.model.state_dict().keys()
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return {name: tensor.detach().cpu().clone() for name, tensor in named.items() if name in persistent}

    def forward(self, weights: Tree, x: Tensor) -> Tensor:
        """Logits (N, classes) of samples (N, *shape)."""
        logits: Tensor = functional_call(self.network, weights, (x,))
        return logits

    def infer(self, weights: Tree, x: Tensor) -> Tensor:
        """The same without gradients, of a network in evaluation mode: on a kernel for all of it, if there is one."""
        if self._whole is not None and self._whole.fits(weights, x):
            return self._whole.logits(weights, x)
        return self.forward(weights, x)

    @cached_property
    def _whole(self) -> ConvNet | None:
        return ConvNet.of(self.network, version=4)

    @torch.no_grad()
    def predict(self, weights: Tree, x: Tensor) -> Tensor:
        """Logits of any number of samples, in evaluation mode."""
        self.network.eval()
        weights = tree.to(weights, self.device)
        return torch.cat([self.infer(weights, part) for part in torch.split(x, BATCH)])

    def features(self, weights: Tree, x: Tensor) -> Tensor:
        """The vectors that the head of a `models.Classifier` takes, (N, width)."""
        return self._submodule("features", weights, x)

    def head(self, weights: Tree, features: Tensor) -> Tensor:
        """Logits of such vectors."""
        return self._submodule("head", weights, features)

    def _submodule(self, name: str, weights: Tree, x: Tensor) -> Tensor:
        own = {full.removeprefix(f"{name}."): tensor for full, tensor in weights.items() if full.startswith(f"{name}.")}
        out: Tensor = functional_call(self.network.get_submodule(name), own, (x,))
        return out

    @torch.no_grad()
    def mean_loss(self, weights: Tree, x: Tensor, y: Tensor) -> float:
        """The mean loss on some samples; the network's mode and buffers stay as they are."""
        training = self.network.training
        self.network.eval()
        loss = self.task.mean_loss(self.infer(weights, x), y)
        self.network.train(training)
        return float(loss)

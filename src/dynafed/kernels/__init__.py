"""Kernels of our own. `coverage` tells what of a network they can do, `accelerate` gives the network that uses them.

For convolutions: blocks of 3x3 convolution, instance norm, ReLU and 2x2 average pooling, with second derivatives. For
fully connected ReLU networks: a whole epoch of training in one call (`mlp.MLPTraining`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from dynafed.kernels import structure
from dynafed.kernels.blocks import ConvBlocks
from dynafed.kernels.build import library
from dynafed.kernels.generator import fits as generator_fits
from dynafed.kernels.generator import train_generator
from dynafed.kernels.mlp import (
    FusedLoss,
    MLPTraining,
    contrast_loss,
    features,
    mean_gradient,
    mixture_loss,
    practice_loss,
)
from dynafed.kernels.ops import weight_gradients_known

__all__ = [
    "Coverage",
    "FusedLoss",
    "MLPTraining",
    "accelerate",
    "contrast_loss",
    "coverage",
    "features",
    "generator_fits",
    "mean_gradient",
    "mixture_loss",
    "practice_loss",
    "train_generator",
    "weight_gradients_known",
]


@dataclass(frozen=True)
class Coverage:
    """What of a network our kernels can do."""

    channels: int
    """Of its convolutional blocks; 0 if there are none."""
    mlp: bool
    """Whether it is a chain of linear layers and ReLUs, in single precision."""


def coverage(network: nn.Module) -> Coverage:
    """Looks at the network's structure; compiles nothing."""
    blocks = [block for part in structure.sequentials(network).values() for block in structure.conv_blocks(part)]
    return Coverage(max((block[0].out_channels for block in blocks), default=0), structure.is_mlp(network))


def accelerate(network: nn.Module) -> nn.Module | None:
    """Returns a copy of the network that runs on our kernels, with the same parameter names; None if there are none.

    Compiles them if they aren't in the cache. A network without convolutional blocks is returned as it is: then it is
    training that has a kernel, not the forward pass.
    """
    if library() is None:
        return None
    parts = [name for name, part in structure.sequentials(network).items() if structure.conv_blocks(part)]
    if not parts:
        return network
    accelerated = copy.deepcopy(network)
    for name in parts:
        fast = ConvBlocks(*accelerated.get_submodule(name).children())
        if not name:
            return fast.train(network.training)
        parent, _, child = name.rpartition(".")
        setattr(accelerated.get_submodule(parent), child, fast)
    return accelerated.train(network.training)

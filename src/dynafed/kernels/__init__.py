"""Kernels of our own. `coverage` tells what of a network they can do, `accelerate` gives the network that uses them.

For convolutions: Winograd's method, from version 3 on; blocks of 3x3 convolution, instance norm, ReLU and 2x2 average
pooling; and group norm with the sum, (leaky) ReLU and 2x2 pooling after it; all with second derivatives. A ConvNet as a
whole (`network.ConvNet`). For fully connected networks: an epoch of training in one call (`mlp.MLPTraining`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from dynafed.config import KERNELS_VERSION
from dynafed.kernels import graph, structure
from dynafed.kernels.activations import Activation
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
from dynafed.kernels.network import ConvNet
from dynafed.kernels.ops import weight_gradients_known

__all__ = [
    "Activation",
    "ConvNet",
    "Coverage",
    "FusedLoss",
    "MLPTraining",
    "accelerate",
    "contrast_loss",
    "coverage",
    "described",
    "features",
    "generator_fits",
    "mean_gradient",
    "mixture_loss",
    "practice_loss",
    "train_generator",
    "weight_gradients_known",
]

log = logging.getLogger("dynafed")


@dataclass(frozen=True)
class Coverage:
    """What of a network our kernels can do."""

    channels: int
    """Of its convolutional blocks; 0 if there are none."""
    mlp: tuple[Activation, ...] = ()
    """What is between the layers, if it is a chain of linear layers in single precision."""


def coverage(network: nn.Module, x: Tensor | None = None, version: int = KERNELS_VERSION) -> Coverage:
    """Looks at the network's structure; compiles nothing. Without a sample, it isn't traced."""
    blocks = [block for part in structure.sequentials(network).values() for block in structure.conv_blocks(part)]
    by_structure = max((block[0].out_channels for block in blocks), default=0)
    if version == 1 or x is None or structure.is_covered(network, version):
        return Coverage(by_structure, structure.mlp_activations(network, version))
    found = [plan.channels for _, plans in graph.plans(network) for plan in plans.values()]
    if found:
        return Coverage(max(found))
    return Coverage(by_structure, graph.mlp_activations(network, x, version))


def accelerate(network: nn.Module, x: Tensor | None = None, version: int = KERNELS_VERSION) -> nn.Module | None:
    """Returns a copy of the network that runs on our kernels, with the same parameter names; None if there are none.

    Compiles them if they aren't in the cache. A network without convolutional blocks is returned as it is: then it is
    training that has a kernel, not the forward pass. A network that was recognized by its graph is first compared with
    itself on torch's kernels, on samples like `x`.
    """
    if library() is None:
        return None
    if version > 1 and x is not None and not structure.is_covered(network, version):
        fast = graph.accelerated(network)
        if fast is not None and version > 2:
            structure.use_winograd(fast)
        if fast is not None and graph.agree(fast, network, x):
            return fast
        if fast is not None:
            log.debug("on our kernels, the network would compute something else: it stays with torch's")
    if coverage(network, version=1).channels:
        fast = _accelerate_sequentials(network, version)
        if version > 2:
            structure.use_winograd(fast)
        return fast
    return network if coverage(network, x, version).mlp else None


def described(network: nn.Module) -> Iterator[str]:
    """What of an accelerated network runs on what, a line a part."""
    for name, part in network.named_modules():
        if isinstance(part, ConvBlocks):
            yield f"{name or 'the network'}: {len(part.block_starts)} whole blocks"
    yield from graph.described(network)


def _accelerate_sequentials(network: nn.Module, version: int) -> nn.Module:
    parts = [name for name, part in structure.sequentials(network).items() if structure.conv_blocks(part)]
    accelerated = copy.deepcopy(network)
    for name in parts:
        fast = ConvBlocks(*accelerated.get_submodule(name).children())
        fast.version = version
        if not name:
            return fast.train(network.training)
        parent, _, child = name.rpartition(".")
        setattr(accelerated.get_submodule(parent), child, fast)
    return accelerated.train(network.training)

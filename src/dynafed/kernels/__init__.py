"""Kernels of our own for the paper's networks.

For the ConvNet: what lies between its convolutions, and its second derivatives. For the MLP: a whole training step.
"""

from __future__ import annotations

from torch import nn

from dynafed.kernels.build import library
from dynafed.models import Features

__all__ = ["use", "users"]


def users(module: nn.Module) -> list[Features]:
    """The parts of a network that our kernels can do."""
    return [part for part in module.modules() if isinstance(part, Features) and part.fit_kernels()]


def use(module: nn.Module, wanted: bool = True) -> bool:
    """Let a network run on our kernels or on torch's; returns whether it does run on ours."""
    parts = users(module)
    wanted = wanted and bool(parts) and library() is not None
    for part in parts:
        part.own_kernels = wanted
    return wanted

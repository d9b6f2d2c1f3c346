"""The activations that our kernels know: what they are, and where a network has one."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
"""Torch's own, in the order in which activations.h numbers them."""

CALLS: dict[Any, str] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_), "relu"),
    **dict.fromkeys((torch.tanh, F.tanh), "tanh"),
    F.leaky_relu: "leaky_relu",
    F.gelu: "gelu",
    F.silu: "silu",
}
"""Functions that a network may call."""
METHODS = {"relu": "relu", "relu_": "relu", "tanh": "tanh", "tanh_": "tanh"}
"""And methods of tensors."""


@dataclass(frozen=True)
class Activation:
    """A function that is applied to each number, with f(0) = 0."""

    name: str
    """One of `FUNCTIONS`."""
    low: float = 0.0
    """The slope of a leaky ReLU below zero."""

    def __call__(self, x: Tensor) -> Tensor:
        """Its values, by torch."""
        return F.leaky_relu(x, self.low) if self.name == "leaky_relu" else FUNCTIONS[self.name](x)


RELU = Activation("relu")


class CActivation(ctypes.Structure):
    """As in activations.h."""

    _fields_ = (("shape", ctypes.c_int64), ("low", ctypes.c_double))


def packed(activations: Sequence[Activation]) -> ctypes.Array[CActivation]:
    """Several as a kernel takes them."""
    numbers = list(FUNCTIONS)
    found = [CActivation(numbers.index(each.name), each.low) for each in activations]
    return (CActivation * len(found))(*found)


def of_layer(layer: nn.Module | None) -> Activation | None:
    """What one of torch's layers is."""
    if type(layer) is nn.ReLU:
        return RELU
    if type(layer) is nn.LeakyReLU:
        return _leaky(layer.negative_slope)
    if type(layer) is nn.GELU:
        return _gelu(layer.approximate)
    name = {nn.Tanh: "tanh", nn.SiLU: "silu"}.get(type(layer))
    return Activation(name) if name else None


def of_node(node: fx.Node, layer: nn.Module | None) -> Activation | None:
    """What a step of a traced graph is; `layer` is what it calls, if that is one of the network's."""
    if node.op == "call_method":
        name = METHODS.get(str(node.target))
        return Activation(name) if name and len(node.args) == 1 and not node.kwargs else None
    if node.op != "call_function" or node.target not in CALLS:
        return of_layer(layer)
    name, options = CALLS[node.target], dict(node.kwargs)
    options.pop("inplace", None)
    options.pop("input", None)
    found: Activation | None = Activation(name)
    if name == "leaky_relu":
        found = _leaky([*node.args[1:2], options.pop("negative_slope", 0.01)][0])
    elif name == "gelu":
        found = _gelu(options.pop("approximate", "none"))
    return None if options else found


def _leaky(slope: Any) -> Activation | None:
    return Activation("leaky_relu", float(slope)) if isinstance(slope, int | float) and math.isfinite(slope) else None


def _gelu(approximate: Any) -> Activation | None:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    return Activation(names[approximate]) if approximate in names else None

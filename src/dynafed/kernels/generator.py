"""Training of a generator of features against many heads, all steps in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dynafed.kernels.build import address, function, lanes
from dynafed.kernels.mlp import addresses
from dynafed.optim import BETAS, EPS, Optimizer

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
"""The generator's parameters (`dynafed.generator`), in the kernel's order."""


def fits(net: Mapping[str, Tensor]) -> bool:
    """Whether units and features are so many that the kernel can do it."""
    return all(len(net[name]) % lanes(torch.float32) == 0 for name in ("0.bias", "3.bias"))


def train_generator(
    net: Mapping[str, Tensor],
    adam: Optimizer,
    heads: tuple[Tensor, Tensor],
    trust: Tensor,
    drawn: Sequence[tuple[Tensor, Tensor]],
    diversity: float,
) -> Tensor:
    """Take a step of Adam for each of `drawn`, labels and noise; returns `generator.generator_loss` before each.

    The generator's weights are column-major, and its parameters are those of `adam`. `heads` are weights (K, classes,
    width) and biases (K, classes).
    """
    weight, bias = heads
    count, classes, width = weight.shape
    more = -count * classes % lanes(torch.float32)
    transposed = F.pad(weight.reshape(-1, width), (0, 0, 0, more)).float().contiguous()
    given = (transposed.t().contiguous(), F.pad(bias.reshape(-1), (0, more)).float().contiguous(), transposed)
    own = {parameter.data_ptr(): number for number, parameter in enumerate(adam.params)}
    tensors = []
    for name in NAMES:
        number = own[net[name].data_ptr()]
        tensors += [net[name], *(adam.moments[moment][number] for moment in ("exp_avg", "exp_avg_sq"))]
    rows, noise = drawn[0][1].shape
    hidden = len(net["0.bias"])
    shapes = {"0.weight": (hidden, noise + classes), "3.weight": (width, hidden)}
    if not fits(net) or any(net[name].shape != shape for name, shape in shapes.items()):
        raise ValueError("the generator doesn't fit the noise, the heads or whole vectors")
    if not all(net[name].t().is_contiguous() for name in shapes):
        raise ValueError("the weights must be column-major")
    steps = [each for labels, z in drawn for each in (labels.to(torch.int64).contiguous(), z.float().contiguous())]
    if any(tensor.shape[0] != rows for tensor in steps):
        raise ValueError(f"every step must have {rows} labels and rows of noise")
    trusted, losses = trust.float().contiguous(), torch.empty(len(drawn))
    function("generator_train")(
        addresses(steps),
        ctypes.c_int64(len(drawn)),
        ctypes.c_int64(rows),
        (ctypes.c_int64 * 4)(noise, classes, hidden, width),
        addresses(tensors),
        ctypes.c_int64(count),
        *map(address, given),
        address(trusted),
        ctypes.c_double(diversity),
        ctypes.c_int64(int(adam.counter)),
        *map(ctypes.c_double, (adam.lr, *BETAS, EPS, adam.weight_decay)),
        address(losses),
    )
    adam.counter += len(drawn)
    return losses

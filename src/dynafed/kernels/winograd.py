"""3x3 convolutions that keep the images' size, by Winograd's method; images lie channels last."""

from __future__ import annotations

import torch
from torch import Tensor

from dynafed.kernels.build import CPP, lanes
from dynafed.kernels.calls import CPU, call, channels_last, empty, sizes_of, taps_of, weights_of


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can take them: images with even sides, and whole vectors of channels."""
    known = x.ndim == weight.ndim == 4 and x.dtype == weight.dtype in CPP and x.device == weight.device == CPU
    if not known or weight.shape[2:] != (3, 3) or min(x.shape) == 0:
        return False
    return not (
        any(side % 2 for side in x.shape[2:]) or any(n % lanes(x.dtype) for n in (*weight.shape[:2], x.shape[1]))
    )


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The convolution with a padding of 1."""
    done: Tensor = torch.ops.dynafed.winograd(x, weight, bias, False)
    return done


def input_gradient(g: Tensor, weight: Tensor) -> Tensor:
    """Its gradient by the images: a convolution with the weights turned around."""
    done: Tensor = torch.ops.dynafed.winograd(g, weight, None, True)
    return done


def weight_gradient(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Its gradients by the weights and by the bias."""
    by_weight, by_bias = torch.ops.dynafed.winograd_weight_gradient(g, x)
    return by_weight, by_bias


@torch.library.custom_op("dynafed::winograd", mutates_args=())
def _winograd(x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool) -> Tensor:
    taps = taps_of(weight.flip(2, 3).transpose(0, 1) if turned else weight)
    images, _, height, width = x.shape
    done = empty(images, taps.shape[3], height, width, like=x)
    call("winograd_forward", channels_last(x), taps, bias, done, sizes=(*sizes_of(x), taps.shape[3]))
    return done


@torch.library.custom_op("dynafed::winograd_weight_gradient", mutates_args=())
def _winograd_weight_gradient(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    taps, sums = x.new_empty(3, 3, x.shape[1], g.shape[1]), x.new_zeros(g.shape[1])
    call("winograd_by_taps", channels_last(g), channels_last(x), taps, sums, sizes=(*sizes_of(x), g.shape[1]))
    return weights_of(taps), sums

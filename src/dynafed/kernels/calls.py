"""How our kernels are called: with the addresses of tensors that lie channels last, sizes and numbers."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dynafed.kernels.build import CPP, address, function

CPU = torch.device("cpu")


def call(name: str, *tensors: Tensor | None, sizes: tuple[int, ...], reals: tuple[float, ...] = ()) -> None:
    """Call the kernel of this name for the tensors' type."""
    rest = [*map(ctypes.c_int64, sizes), *map(ctypes.c_double, reals)]
    kind = next(CPP[tensor.dtype] for tensor in tensors if tensor is not None)
    # A gradient that torch spreads out of a single number has no memory of its own.
    dense = [tensor.contiguous() if tensor is not None and tensor.ndim == 1 else tensor for tensor in tensors]
    function(f"{name}_{kind}")(*map(address, dense), *rest)


def sizes_of(z: Tensor) -> tuple[int, ...]:
    """The images' number, height, width and channels."""
    images, channels, height, width = z.shape
    return images, height, width, channels


def empty(*shape: int, like: Tensor) -> Tensor:
    """Images without content, channels last."""
    return torch.empty(shape, dtype=like.dtype, memory_format=torch.channels_last)


def channels_last(x: Tensor) -> Tensor:
    """The same, channels last. With one channel it is so either way, but torch looks at the strides."""
    there = x.is_contiguous(memory_format=torch.channels_last) and x.stride(1) == 1
    return x if there else x.clone(memory_format=torch.channels_last)


def taps_of(weight: Tensor) -> Tensor:
    """A convolution's weights as the kernels take them: row, column, channel, output."""
    return weight.permute(2, 3, 1, 0).contiguous()


def weights_of(taps: Tensor) -> Tensor:
    """The inverse of `taps_of`."""
    return taps.permute(3, 2, 0, 1).clone(memory_format=torch.contiguous_format)

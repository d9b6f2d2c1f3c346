"""The ConvNet's two operations on images that lie channels last, differentiable twice without a detour.

Torch's own second derivative of a convolution convolves with kernels as large as the images, and that of a norm takes
dozens of trips through memory. Here, each derivative of a convolution is one of the three products that every library
has (forward, by input, by weight), and norm, ReLU and pooling are one kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dynafed.kernels.build import CPP, address, function, lanes

FEW = (1, 3)
"""Channels of images whose gradient torch finds at a tenth of its usual speed."""

_known = threading.local()


@contextlib.contextmanager
def weight_gradients_known() -> Iterator[None]:
    """For whoever wants nothing but derivatives of the weights' gradients: these themselves are left at zero."""
    _known.weight_gradients = True
    try:
        yield
    finally:
        _known.weight_gradients = False


def convolution(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    """A 3x3 convolution of stride 1."""
    # Two nodes, so that the gradient by the input is only computed where somebody asks for it.
    x = _last(x)
    out = _ByInput.of(x, weight.detach(), bias.detach(), padding, lambda: weight)
    done: Tensor = _ByWeight.of(out, x, weight, bias, padding)
    return done


def norm_relu_pool(z: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Instance norm, ReLU and 2x2 average pooling."""
    pooled: Tensor = _Pooled.of(_last(z), gamma, beta, eps)
    return pooled


class _Function(torch.autograd.Function):
    @classmethod
    def of(cls, *inputs: Any) -> Any:
        return cls.apply(*inputs)  # type: ignore[no-untyped-call]


class _ByInput(_Function):
    """The convolution, as a function of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: int, attached: Any) -> Tensor:
        ctx.attached, ctx.padding, ctx.shape = attached, padding, x.shape
        return torch.conv2d(x, _last(weight), bias, padding=padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _InputGradient.of(_last(g), ctx.attached(), ctx.padding, ctx.shape), None, None, None, None


class _InputGradient(_Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, weight: Tensor, padding: int, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(g, weight)
        ctx.padding = padding
        return _input_gradient(g, weight, padding, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> Any:
        g, weight = ctx.saved_tensors
        v = _last(v)
        by_weight, _ = _weight_gradient(g, v, weight, ctx.padding)
        return torch.conv2d(v, _last(weight), padding=ctx.padding), by_weight, None, None


class _ByWeight(_Function):
    """The convolution, as a function of its weights; the value is there already."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return g, None, *_WeightGradient.of(_last(g), x, weight.detach(), ctx.padding), None


class _WeightGradient(_Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(g, x)
        ctx.padding = padding
        if getattr(_known, "weight_gradients", False):
            return torch.zeros_like(weight), weight.new_zeros(len(weight))
        return _weight_gradient(g, x, weight, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, w: Tensor) -> Any:
        g, x = ctx.saved_tensors
        by_input = _input_gradient(g, v, ctx.padding, x.shape) if ctx.needs_input_grad[1] else None
        return torch.conv2d(x, _last(v), w, padding=ctx.padding), by_input, None, None


def _weight_gradient(g: Tensor, x: Tensor, weight: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    _, by_weight, by_bias = _products(g, x, weight, padding, (False, True, True))
    return by_weight, by_bias


def _input_gradient(g: Tensor, weight: Tensor, padding: int, shape: torch.Size) -> Tensor:
    if shape[1] in FEW:
        taps = weight.permute(0, 2, 3, 1).flatten(1)
        taps = F.pad(taps, (0, -taps.shape[1] % lanes(g.dtype)))
        few: Tensor = torch.ops.dynafed.image_gradient(g, taps, padding, shape)
        return few
    like = torch.empty(shape, dtype=g.dtype, memory_format=torch.channels_last)
    return _products(g, like, weight, padding, (True, False, False))[0]


def _products(g: Tensor, x: Tensor, weight: Tensor, padding: int, wanted: tuple[bool, ...]) -> tuple[Tensor, ...]:
    size = [len(weight)]
    pad, ones, zeros = [padding] * 2, [1, 1], [0, 0]
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        g, x, _last(weight), size, ones, pad, ones, False, zeros, 1, wanted
    )
    return found


class _Pooled(_Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Any:
        pooled, mean, rstd = torch.ops.dynafed.pooled(z, gamma, beta, eps)
        ctx.save_for_backward(z, mean, rstd, gamma, beta)
        return pooled

    @staticmethod
    def backward(ctx: Any, dp: Tensor) -> Any:
        return *_PooledGradient.of(_last(dp), *ctx.saved_tensors), None


class _PooledGradient(_Function):
    @staticmethod
    def forward(ctx: Any, dp: Tensor, z: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, beta: Tensor) -> Any:
        ctx.save_for_backward(dp, z, mean, rstd, gamma, beta)
        return torch.ops.dynafed.pooled_gradient(dp, z, mean, rstd, gamma, beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, u: Tensor, s: Tensor) -> Any:
        by_dp, by_z, by_gamma = torch.ops.dynafed.pooled_gradient_gradient(_last(v), u, s, *ctx.saved_tensors)
        return by_dp, by_z, None, None, by_gamma, None


@torch.library.custom_op("dynafed::pooled", mutates_args=())
def _pooled(z: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    images, channels, height, width = z.shape
    pooled = _empty(images, channels, height // 2, width // 2, like=z)
    mean, rstd = z.new_empty(images, channels), z.new_empty(images, channels)
    _call("forward", z, gamma, beta, pooled, mean, rstd, sizes=_sizes(z), eps=eps)
    return pooled, mean, rstd


@torch.library.custom_op("dynafed::pooled_gradient", mutates_args=())
def _pooled_gradient(
    dp: Tensor, z: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dz, dgamma, dbeta = torch.empty_like(z), torch.zeros_like(gamma), torch.zeros_like(beta)
    _call("backward", dp, z, mean, rstd, gamma, beta, dz, dgamma, dbeta, sizes=_sizes(z))
    return dz, dgamma, dbeta


@torch.library.custom_op("dynafed::pooled_gradient_gradient", mutates_args=())
def _pooled_gradient_gradient(
    v: Tensor,
    u: Tensor,
    s: Tensor,
    dp: Tensor,
    z: Tensor,
    mean: Tensor,
    rstd: Tensor,
    gamma: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    by_dp, by_z, by_gamma = torch.empty_like(dp), torch.empty_like(z), torch.zeros_like(gamma)
    _call("twice", v, u, s, dp, z, mean, rstd, gamma, beta, by_dp, by_z, by_gamma, sizes=_sizes(z))
    return by_dp, by_z, by_gamma


@torch.library.custom_op("dynafed::image_gradient", mutates_args=())
def _image_gradient(g: Tensor, weights: Tensor, padding: int, shape: list[int]) -> Tensor:
    images, channels, height, width = shape
    dx = _empty(*shape, like=g)
    _call("image", g, weights, dx, sizes=(images, height, width, g.shape[1], padding, channels))
    return dx


def _call(name: str, *tensors: Tensor, sizes: tuple[int, ...], eps: float | None = None) -> None:
    rest = [ctypes.c_int64(size) for size in sizes] + ([ctypes.c_double(eps)] if eps is not None else [])
    function(f"{name}_{CPP[tensors[0].dtype]}")(*map(address, tensors), *rest)


def _sizes(z: Tensor) -> tuple[int, ...]:
    images, channels, height, width = z.shape
    return images, height, width, channels


def _empty(*shape: int, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, memory_format=torch.channels_last)


def _last(x: Tensor) -> Tensor:
    """The same, channels last. With one channel it is so either way, but torch looks at the strides."""
    there = x.is_contiguous(memory_format=torch.channels_last) and x.stride(1) == 1
    return x if there else x.clone(memory_format=torch.channels_last)

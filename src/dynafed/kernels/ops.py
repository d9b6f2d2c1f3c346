"""The ConvNet's blocks on images that lie channels last, differentiable twice without a detour.

Torch's own second derivative of a convolution convolves with kernels as large as the images, and that of a norm takes
dozens of trips through memory. Here, each derivative of a convolution is one of the three products that every library
has (forward, by input, by weight), and norm, ReLU and pooling are one kernel; the first block is one kernel as a whole.
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

from dynafed.kernels.build import CPP, address, function

FEW = (1, 3)
"""Channels of images for which there is a kernel for a whole block; torch's convolutions are slow with so few."""

_known = threading.local()


@contextlib.contextmanager
def weight_gradients_known() -> Iterator[None]:
    """For whoever wants nothing but derivatives of the weights' gradients: these themselves are left at zero."""
    _known.weight_gradients = True
    try:
        yield
    finally:
        _known.weight_gradients = False


def block(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, padding: int, eps: float = 1e-5
) -> Tensor:
    """A 3x3 convolution of stride 1, instance norm, ReLU and 2x2 average pooling."""
    if any((side + 2 * padding) % 2 for side in x.shape[2:]):
        z = convolution(x, weight, bias, padding)
        return F.avg_pool2d(F.relu(F.group_norm(z, len(gamma), gamma, beta, eps)), 2)
    if x.shape[1] in FEW:
        pooled: Tensor = _First.of(_last(x), weight, bias, gamma, beta, padding, eps)
        return pooled
    return norm_relu_pool(convolution(x, weight, bias, padding), gamma, beta, eps)


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


class _First(_Function):
    """A block on images of few channels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, padding: int, eps: float
    ) -> Any:
        pooled, mean, rstd = torch.ops.dynafed.first(x, _taps(weight), bias, gamma, beta, padding, eps)
        ctx.save_for_backward(x, weight, bias, gamma, beta, mean, rstd)
        ctx.padding = padding
        return pooled

    @staticmethod
    def backward(ctx: Any, dp: Tensor) -> Any:
        wanted = ctx.needs_input_grad[0]
        return *_FirstGradient.of(_last(dp), *ctx.saved_tensors, ctx.padding, wanted), None, None


class _FirstGradient(_Function):
    @staticmethod
    def forward(ctx: Any, dp: Tensor, *given: Any) -> Any:
        *tensors, ctx.padding, wanted = given
        x, weight, bias, gamma, beta, mean, rstd = tensors
        ctx.save_for_backward(dp, *tensors)
        ctx.set_materialize_grads(False)
        if getattr(_known, "weight_gradients", False):
            return None, *map(torch.zeros_like, (weight, bias, gamma, beta))
        dx, taps, *rest = torch.ops.dynafed.first_gradient(
            dp, x, _taps(weight), bias, gamma, beta, mean, rstd, ctx.padding, wanted
        )
        return dx if wanted else None, _untapped(taps), *rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, vx: Tensor | None, *along: Tensor | None) -> Any:
        dp, x, weight, bias, gamma, beta, mean, rstd = ctx.saved_tensors
        given = zip(along, (weight, bias, gamma, beta), strict=True)
        vw, vb, u, s = (torch.zeros_like(like) if one is None else one for one, like in given)
        by_dp, by_x, taps, by_bias, by_gamma = torch.ops.dynafed.first_gradient_gradient(
            None if vx is None else _last(vx),
            _taps(vw),
            vb,
            u,
            s,
            dp,
            x,
            _taps(weight),
            bias,
            gamma,
            beta,
            mean,
            rstd,
            ctx.padding,
            ctx.needs_input_grad[1],
        )
        by_x = by_x if ctx.needs_input_grad[1] else None
        return by_dp, by_x, _untapped(taps), by_bias, by_gamma, None, None, None, None, None


def _taps(weight: Tensor) -> Tensor:
    """A convolution's weights as the kernels of the first block take them: row, column, channel, output."""
    return weight.permute(2, 3, 1, 0).contiguous()


def _untapped(taps: Tensor) -> Tensor:
    return taps.permute(3, 2, 0, 1).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("dynafed::first", mutates_args=())
def _first(
    x: Tensor, taps: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, padding: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    images, _, height, width = x.shape
    mean, rstd = (x.new_empty(images, len(bias)) for _ in range(2))
    pooled = _empty(images, len(bias), (height + 2 * padding - 2) // 2, (width + 2 * padding - 2) // 2, like=x)
    sizes = _few_sizes(x, bias, padding)
    _call("first_forward", x, taps, bias, gamma, beta, pooled, mean, rstd, sizes=sizes, eps=eps)
    return pooled, mean, rstd


@torch.library.custom_op("dynafed::first_gradient", mutates_args=())
def _first_gradient(
    dp: Tensor,
    x: Tensor,
    taps: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    rstd: Tensor,
    padding: int,
    image: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx = _empty(*x.shape, like=x) if image else x.new_empty(0)
    dtaps, dbias, dgamma, dbeta = map(torch.zeros_like, (taps, bias, gamma, beta))
    given, found = (dp, x, taps, bias, mean, rstd, gamma, beta), (dtaps, dbias, dgamma, dbeta)
    _call("first_backward", *given, dx if image else None, *found, sizes=_few_sizes(x, bias, padding))
    return dx, dtaps, dbias, dgamma, dbeta


@torch.library.custom_op("dynafed::first_gradient_gradient", mutates_args=())
def _first_gradient_gradient(
    vx: Tensor | None,
    vtaps: Tensor,
    vb: Tensor,
    u: Tensor,
    s: Tensor,
    dp: Tensor,
    x: Tensor,
    taps: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    rstd: Tensor,
    padding: int,
    image: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    by_dp, by_x = torch.empty_like(dp), _empty(*x.shape, like=x) if image else x.new_empty(0)
    by_taps, by_bias, by_gamma = map(torch.zeros_like, (taps, bias, gamma))
    given = (vx, vtaps, vb, u, s, dp, x, taps, bias, mean, rstd, gamma, beta, by_dp, by_x if image else None)
    _call("first_twice", *given, by_taps, by_bias, by_gamma, sizes=_few_sizes(x, bias, padding))
    return by_dp, by_x, by_taps, by_bias, by_gamma


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


def _call(name: str, *tensors: Tensor | None, sizes: tuple[int, ...], eps: float | None = None) -> None:
    rest = [ctypes.c_int64(size) for size in sizes] + ([ctypes.c_double(eps)] if eps is not None else [])
    kind = next(CPP[tensor.dtype] for tensor in tensors if tensor is not None)
    # A gradient that torch spreads out of a single number has no memory of its own.
    dense = [tensor.contiguous() if tensor is not None and tensor.ndim == 1 else tensor for tensor in tensors]
    function(f"{name}_{kind}")(*map(address, dense), *rest)


def _sizes(z: Tensor) -> tuple[int, ...]:
    images, channels, height, width = z.shape
    return images, height, width, channels


def _few_sizes(x: Tensor, bias: Tensor, padding: int) -> tuple[int, ...]:
    images, channels, height, width = x.shape
    return images, height, width, channels, len(bias), padding


def _empty(*shape: int, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, memory_format=torch.channels_last)


def _last(x: Tensor) -> Tensor:
    """The same, channels last. With one channel it is so either way, but torch looks at the strides."""
    there = x.is_contiguous(memory_format=torch.channels_last) and x.stride(1) == 1
    return x if there else x.clone(memory_format=torch.channels_last)

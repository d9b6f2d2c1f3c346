"""The ConvNet's blocks on images that lie channels last, differentiable twice without a detour.

Torch's own second derivative of a convolution convolves with kernels as large as the images, and that of a norm takes
dozens of trips through memory. Here, each derivative of a convolution is one of the three products that every library
has (forward, by input, by weight), and norm, ReLU and pooling are one kernel; the first block is one kernel as a whole.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dynafed.kernels import winograd
from dynafed.kernels.build import CPP, lanes
from dynafed.kernels.calls import CPU, call, channels_last, empty, sizes_of, taps_of, weights_of
from dynafed.kernels.structure import is_winograd

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


def block_of(x: Tensor, conv: Any, norm: Any) -> Tensor:
    """The block that begins with these two layers."""
    return block(x, conv.weight, conv.bias, norm.weight, norm.bias, conv.padding[0], norm.eps, is_winograd(conv))


def block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    padding: int,
    eps: float = 1e-5,
    winograd: bool = False,
) -> Tensor:
    """A 3x3 convolution of stride 1, instance norm, ReLU and 2x2 average pooling."""
    geometry = Geometry((padding, padding), winograd=winograd)
    known = x.ndim == 4 and _are_lanes(x, weight, bias, gamma, beta)
    if not known or any(side < 4 or side % 2 for side in (side + 2 * padding for side in x.shape[2:])):
        z = convolution(x, weight, bias, geometry)
        return F.avg_pool2d(F.relu(F.group_norm(z, len(gamma), gamma, beta, eps)), 2)
    if x.shape[1] in FEW:
        pooled: Tensor = _First.of(channels_last(x), weight, bias, gamma, beta, padding, eps)
        return pooled
    return norm_relu_pool(convolution(x, weight, bias, geometry), gamma, beta, eps)


@dataclass(frozen=True)
class Geometry:
    """How a convolution's kernel goes over the image: by height, by width."""

    padding: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    winograd: bool = False
    """Whether it is done by Winograd's method, if that fits; else by torch."""

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The convolution."""
        if self.is_winograd(x, weight):
            return winograd.convolve(x, weight, bias)
        return torch.conv2d(x, channels_last(weight), bias, self.stride, self.padding, self.dilation, self.groups)

    def is_winograd(self, x: Tensor, weight: Tensor) -> bool:
        """Whether Winograd's method is wanted and fits; it doesn't matter whether `x` is the input or the output."""
        plain = (self.padding, self.stride, self.dilation, self.groups) == ((1, 1), (1, 1), (1, 1), 1)
        return self.winograd and plain and winograd.fits(x, weight)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """A convolution."""
    if x.ndim != 4:
        return torch.conv2d(x, weight, bias, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    # Two nodes, so that the gradient by the input is only computed where somebody asks for it.
    x = channels_last(x)
    out = _ByInput.of(x, weight.detach(), None if bias is None else bias.detach(), geometry, lambda: weight)
    done: Tensor = _ByWeight.of(out, x, weight, bias, geometry)
    return done


POOLS = ("none", "mean", "max")
"""What is done with windows of 2x2; in this order, the kernels count them."""


@dataclass(frozen=True)
class Rest:
    """What comes after a convolution: group norm, the sum with a shortcut, (leaky) ReLU and pooling."""

    groups: int
    """Of the norm; 0 if there is none."""
    eps: float = 1e-5
    low: float = 0.0
    """The activation's slope below zero: 0 is ReLU, 1 is none."""
    pool: str = "none"

    @property
    def numbers(self) -> tuple[int, int, float]:
        """As the kernels take them."""
        return self.groups, POOLS.index(self.pool), self.low

    def __call__(self, z: Tensor, gamma: Tensor | None, beta: Tensor | None, shortcut: Tensor | None = None) -> Tensor:
        """All of it, by one kernel; channels last."""
        if not self._fits(z, gamma, beta, shortcut):
            return self.by_torch(z, gamma, beta, shortcut)
        gamma = z.new_ones(z.shape[1]) if gamma is None else gamma
        beta = z.new_zeros(z.shape[1]) if beta is None else beta
        shortcut = None if shortcut is None else channels_last(shortcut)
        done: Tensor = _Normed.of(channels_last(z), shortcut, gamma, beta, self)
        return done

    def _fits(self, z: Tensor, gamma: Tensor | None, beta: Tensor | None, shortcut: Tensor | None) -> bool:
        """Whether the kernel would read what it is meant to."""
        if z.ndim != 4 or min(z.shape) == 0 or z.dtype not in CPP or (self.groups and z.shape[1] % self.groups):
            return False
        if self.groups and z.shape[1] // self.groups * z.shape[2] * z.shape[3] == 1:
            return False  # torch refuses it
        if self.pool != "none" and min(z.shape[2:]) < 2:
            return False
        wanted = ((gamma, z.shape[1:2]), (beta, z.shape[1:2]), (shortcut, z.shape))
        return all(
            tensor is None or (tensor.shape == shape and tensor.dtype == z.dtype and tensor.device == z.device == CPU)
            for tensor, shape in wanted
        )

    def by_torch(self, z: Tensor, gamma: Tensor | None, beta: Tensor | None, shortcut: Tensor | None = None) -> Tensor:
        """The same by torch."""
        if self.groups:
            z = F.group_norm(z, self.groups, gamma, beta, self.eps)
        if shortcut is not None:
            z = z + shortcut
        if self.low != 1:
            z = F.leaky_relu(z, self.low)
        if self.pool == "none":
            return z
        return F.avg_pool2d(z, 2) if self.pool == "mean" else F.max_pool2d(z, 2)


def norm_relu_pool(z: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Instance norm, ReLU and 2x2 average pooling."""
    if z.ndim != 4 or not _are_lanes(z, gamma, beta) or min(z.shape[2:]) == 0 or any(side % 2 for side in z.shape[2:]):
        return F.avg_pool2d(F.relu(F.group_norm(z, len(gamma), gamma, beta, eps)), 2)
    pooled: Tensor = _Pooled.of(channels_last(z), gamma, beta, eps)
    return pooled


def _are_lanes(x: Tensor, *others: Tensor) -> bool:
    """Whether the kernels of whole blocks can take them: of one type, with whole vectors of channels."""
    same = all(other.dtype == x.dtype and other.device == x.device == CPU for other in others)
    return (
        same
        and x.dtype in CPP
        and all(len(other) == len(others[0]) for other in others)
        and (len(others[0]) % lanes(x.dtype) == 0)
    )


class _Function(torch.autograd.Function):
    @classmethod
    def of(cls, *inputs: Any) -> Any:
        return cls.apply(*inputs)  # type: ignore[no-untyped-call]


class _ByInput(_Function):
    """The convolution, as a function of its input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, attached: Callable[[], Tensor]
    ) -> Tensor:
        ctx.attached, ctx.geometry, ctx.shape = attached, geometry, x.shape
        return geometry.convolve(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _InputGradient.of(channels_last(g), ctx.attached(), ctx.geometry, ctx.shape), None, None, None, None


class _InputGradient(_Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, weight: Tensor, geometry: Geometry, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(g, weight)
        ctx.geometry = geometry
        return _input_gradient(g, weight, geometry, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> Any:
        g, weight = ctx.saved_tensors
        v = channels_last(v)
        by_weight, _ = _weight_gradient(g, v, weight, ctx.geometry)
        return ctx.geometry.convolve(v, weight), by_weight, None, None


class _ByWeight(_Function):
    """The convolution, as a function of its weights; the value is there already."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.biased = geometry, bias is not None
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return g, None, *_WeightGradient.of(channels_last(g), x, weight.detach(), ctx.geometry, ctx.biased), None


class _WeightGradient(_Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(g, x)
        ctx.geometry, ctx.biased = geometry, biased
        if getattr(_known, "weight_gradients", False):
            return torch.zeros_like(weight), weight.new_zeros(len(weight)) if biased else None
        return _weight_gradient(g, x, weight, geometry, biased)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, w: Tensor | None) -> Any:
        g, x = ctx.saved_tensors
        by_input = _input_gradient(g, v, ctx.geometry, x.shape) if ctx.needs_input_grad[1] else None
        return ctx.geometry.convolve(x, v, w if ctx.biased else None), by_input, None, None, None


def _weight_gradient(
    g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, biased: bool = True
) -> tuple[Tensor, Tensor | None]:
    if geometry.is_winograd(x, weight):
        by_weight, by_bias = winograd.weight_gradient(g, x)
        return by_weight, by_bias if biased else None
    _, by_weight, by_bias = _products(g, x, weight, geometry, (False, True, biased))
    return by_weight, by_bias if biased else None


def _input_gradient(g: Tensor, weight: Tensor, geometry: Geometry, shape: torch.Size) -> Tensor:
    if geometry.is_winograd(g, weight):
        return winograd.input_gradient(g, weight)
    like = torch.empty(shape, dtype=g.dtype, memory_format=torch.channels_last)
    return _products(g, like, weight, geometry, (True, False, False))[0]


def _products(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: tuple[bool, ...]) -> tuple[Tensor, ...]:
    how = geometry.stride, geometry.padding, geometry.dilation, False, [0, 0], geometry.groups
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        g, x, channels_last(weight), [len(weight)], *how, wanted
    )
    return found


class _Normed(_Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, shortcut: Tensor | None, gamma: Tensor, beta: Tensor, rest: Rest) -> Any:
        ctx.rest = rest
        done, mean, rstd = torch.ops.dynafed.normed(z, shortcut, gamma, beta, *rest.numbers, rest.eps)
        ctx.save_for_backward(z, shortcut, mean, rstd, gamma, beta)
        return done

    @staticmethod
    def backward(ctx: Any, dp: Tensor) -> Any:
        return *_NormedGradient.of(channels_last(dp), *ctx.saved_tensors, ctx.rest), None


class _NormedGradient(_Function):
    @staticmethod
    def forward(ctx: Any, dp: Tensor, *given: Any) -> Any:
        *tensors, ctx.rest = given
        ctx.save_for_backward(dp, *tensors)
        dz, dshortcut, dgamma, dbeta = torch.ops.dynafed.normed_gradient(dp, *tensors, *ctx.rest.numbers)
        return dz, None if tensors[1] is None else dshortcut, dgamma, dbeta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, t: Tensor | None, u: Tensor, s: Tensor) -> Any:
        dp, z, shortcut, *rest = ctx.saved_tensors
        t = None if shortcut is None or t is None else channels_last(t)
        by_dp, by_z, by_gamma = torch.ops.dynafed.normed_gradient_gradient(
            channels_last(v), t, u, s, dp, z, shortcut, *rest, *ctx.rest.numbers
        )
        return by_dp, by_z, None, None, None, by_gamma, None, None


class _Pooled(_Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Any:
        pooled, mean, rstd = torch.ops.dynafed.pooled(z, gamma, beta, eps)
        ctx.save_for_backward(z, mean, rstd, gamma, beta)
        return pooled

    @staticmethod
    def backward(ctx: Any, dp: Tensor) -> Any:
        return *_PooledGradient.of(channels_last(dp), *ctx.saved_tensors), None


class _PooledGradient(_Function):
    @staticmethod
    def forward(ctx: Any, dp: Tensor, z: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, beta: Tensor) -> Any:
        ctx.save_for_backward(dp, z, mean, rstd, gamma, beta)
        return torch.ops.dynafed.pooled_gradient(dp, z, mean, rstd, gamma, beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, u: Tensor, s: Tensor) -> Any:
        by_dp, by_z, by_gamma = torch.ops.dynafed.pooled_gradient_gradient(channels_last(v), u, s, *ctx.saved_tensors)
        return by_dp, by_z, None, None, by_gamma, None


class _First(_Function):
    """A block on images of few channels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, padding: int, eps: float
    ) -> Any:
        pooled, mean, rstd = torch.ops.dynafed.first(x, taps_of(weight), bias, gamma, beta, padding, eps)
        ctx.save_for_backward(x, weight, bias, gamma, beta, mean, rstd)
        ctx.padding = padding
        return pooled

    @staticmethod
    def backward(ctx: Any, dp: Tensor) -> Any:
        wanted = ctx.needs_input_grad[0]
        return *_FirstGradient.of(channels_last(dp), *ctx.saved_tensors, ctx.padding, wanted), None, None


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
            dp, x, taps_of(weight), bias, gamma, beta, mean, rstd, ctx.padding, wanted
        )
        return dx if wanted else None, weights_of(taps), *rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, vx: Tensor | None, *along: Tensor | None) -> Any:
        dp, x, weight, bias, gamma, beta, mean, rstd = ctx.saved_tensors
        given = zip(along, (weight, bias, gamma, beta), strict=True)
        vw, vb, u, s = (torch.zeros_like(like) if one is None else one for one, like in given)
        by_dp, by_x, taps, by_bias, by_gamma = torch.ops.dynafed.first_gradient_gradient(
            None if vx is None else channels_last(vx),
            taps_of(vw),
            vb,
            u,
            s,
            dp,
            x,
            taps_of(weight),
            bias,
            gamma,
            beta,
            mean,
            rstd,
            ctx.padding,
            ctx.needs_input_grad[1],
        )
        by_x = by_x if ctx.needs_input_grad[1] else None
        return by_dp, by_x, weights_of(taps), by_bias, by_gamma, None, None, None, None, None


@torch.library.custom_op("dynafed::first", mutates_args=())
def _first(
    x: Tensor, taps: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, padding: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    images, _, height, width = x.shape
    mean, rstd = (x.new_empty(images, len(bias)) for _ in range(2))
    pooled = empty(images, len(bias), (height + 2 * padding - 2) // 2, (width + 2 * padding - 2) // 2, like=x)
    sizes = _few_sizes(x, bias, padding)
    call("first_forward", x, taps, bias, gamma, beta, pooled, mean, rstd, sizes=sizes, reals=(eps,))
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
    dx = empty(*x.shape, like=x) if image else x.new_empty(0)
    dtaps, dbias, dgamma, dbeta = map(torch.zeros_like, (taps, bias, gamma, beta))
    given, found = (dp, x, taps, bias, mean, rstd, gamma, beta), (dtaps, dbias, dgamma, dbeta)
    call("first_backward", *given, dx if image else None, *found, sizes=_few_sizes(x, bias, padding))
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
    by_dp, by_x = torch.empty_like(dp), empty(*x.shape, like=x) if image else x.new_empty(0)
    by_taps, by_bias, by_gamma = map(torch.zeros_like, (taps, bias, gamma))
    given = (vx, vtaps, vb, u, s, dp, x, taps, bias, mean, rstd, gamma, beta, by_dp, by_x if image else None)
    call("first_twice", *given, by_taps, by_bias, by_gamma, sizes=_few_sizes(x, bias, padding))
    return by_dp, by_x, by_taps, by_bias, by_gamma


@torch.library.custom_op("dynafed::pooled", mutates_args=())
def _pooled(z: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    images, channels, height, width = z.shape
    pooled = empty(images, channels, height // 2, width // 2, like=z)
    mean, rstd = z.new_empty(images, channels), z.new_empty(images, channels)
    call("forward", z, gamma, beta, pooled, mean, rstd, sizes=sizes_of(z), reals=(eps,))
    return pooled, mean, rstd


@torch.library.custom_op("dynafed::pooled_gradient", mutates_args=())
def _pooled_gradient(
    dp: Tensor, z: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dz, dgamma, dbeta = torch.empty_like(z), torch.zeros_like(gamma), torch.zeros_like(beta)
    call("backward", dp, z, mean, rstd, gamma, beta, dz, dgamma, dbeta, sizes=sizes_of(z))
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
    call("twice", v, u, s, dp, z, mean, rstd, gamma, beta, by_dp, by_z, by_gamma, sizes=sizes_of(z))
    return by_dp, by_z, by_gamma


@torch.library.custom_op("dynafed::normed", mutates_args=())
def _normed(
    z: Tensor, shortcut: Tensor | None, gamma: Tensor, beta: Tensor, groups: int, pool: int, low: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    images, channels, height, width = z.shape
    side = 2 if pool else 1
    done = empty(images, channels, height // side, width // side, like=z)
    mean, rstd = z.new_empty(images, channels), z.new_empty(images, channels)
    sizes = (*sizes_of(z), groups, pool)
    call("norm_forward", z, shortcut, gamma, beta, done, mean, rstd, sizes=sizes, reals=(low, eps))
    return done, mean, rstd


@torch.library.custom_op("dynafed::normed_gradient", mutates_args=())
def _normed_gradient(
    dp: Tensor,
    z: Tensor,
    shortcut: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    gamma: Tensor,
    beta: Tensor,
    groups: int,
    pool: int,
    low: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dz, dgamma, dbeta = torch.empty_like(z), torch.zeros_like(gamma), torch.zeros_like(beta)
    dshortcut = z.new_empty(0) if shortcut is None else torch.empty_like(z)
    given = (dp, z, shortcut, mean, rstd, gamma, beta, dz, None if shortcut is None else dshortcut, dgamma, dbeta)
    call("norm_backward", *given, sizes=(*sizes_of(z), groups, pool), reals=(low,))
    return dz, dshortcut, dgamma, dbeta


@torch.library.custom_op("dynafed::normed_gradient_gradient", mutates_args=())
def _normed_gradient_gradient(
    v: Tensor,
    t: Tensor | None,
    u: Tensor,
    s: Tensor,
    dp: Tensor,
    z: Tensor,
    shortcut: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    gamma: Tensor,
    beta: Tensor,
    groups: int,
    pool: int,
    low: float,
) -> tuple[Tensor, Tensor, Tensor]:
    by_dp, by_z, by_gamma = torch.empty_like(dp), torch.empty_like(z), torch.zeros_like(gamma)
    given = (v, t, u, s, dp, z, shortcut, mean, rstd, gamma, beta, by_dp, by_z, by_gamma)
    call("norm_twice", *given, sizes=(*sizes_of(z), groups, pool), reals=(low,))
    return by_dp, by_z, by_gamma


def _few_sizes(x: Tensor, bias: Tensor, padding: int) -> tuple[int, ...]:
    images, channels, height, width = x.shape
    return images, height, width, channels, len(bias), padding

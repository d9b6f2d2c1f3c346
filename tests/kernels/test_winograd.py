"""Convolutions by Winograd's method: they and their derivatives are torch's, and older runs don't meet them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from dynafed import kernels
from dynafed.kernels import build, ops, winograd
from dynafed.kernels.structure import is_winograd
from dynafed.models import ConvNetSettings, ResNetSettings, convnet, resnet

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C++ compiler here")

SAME = ops.Geometry((1, 1), winograd=True)
SHAPES = [(1, 8, 8, 2, 2), (3, 8, 16, 4, 6), (2, 24, 8, 8, 8), (5, 16, 40, 2, 14), (2, 104, 8, 4, 4)]


def inputs(images: int, channels: int, outputs: int, height: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = (images, channels, height, width), (outputs, channels, 3, 3), (outputs,)
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def derivatives(given: list[Tensor], geometry: ops.Geometry | None) -> list[Tensor]:
    """The convolution, its gradients, and those of a function of its gradients."""
    x, weight, bias = given
    out = torch.conv2d(x, weight, bias, padding=1) if geometry is None else ops.convolution(x, weight, bias, geometry)
    first = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
    return [out, *first, *torch.autograd.grad(sum(each.sin().sum() for each in first), given)]


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_torchs_convolution_with_two_derivatives(shape: tuple[int, ...]) -> None:
    given = inputs(*shape, dtype=torch.float64)
    assert SAME.is_winograd(*given[:2])
    for ours, torchs in zip(derivatives(given, SAME), derivatives(given, None), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-10)


def test_numeric_derivatives_agree() -> None:
    given = inputs(2, 8, 8, 2, 4, dtype=torch.float64)
    for check in (gradcheck, gradgradcheck):
        assert check(lambda *each: ops.convolution(*each, SAME), given, fast_mode=True)


def test_in_single_precision_it_is_as_exact_as_torchs() -> None:
    given = inputs(8, 64, 64, 8, 8, dtype=torch.float32)
    assert SAME.is_winograd(*given[:2])
    exact = derivatives([each.detach().double().requires_grad_() for each in given], None)[:4]
    ours, torchs = (
        [
            float((found.detach().double() - true.detach()).norm() / true.detach().norm())
            for found, true in zip(each, exact, strict=False)
        ]
        for each in (derivatives(given, SAME), derivatives(given, None))
    )
    assert ours[0] < 1e-6
    assert all(one < 3 * other for one, other in zip(ours, torchs, strict=True))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        ((2, 16, 5, 4), (16, 16, 3, 3)),
        ((2, 16, 4, 7), (16, 16, 3, 3)),
        ((2, 12, 4, 4), (16, 12, 3, 3)),
        ((2, 16, 4, 4), (10, 16, 3, 3)),
        ((2, 16, 4, 4), (16, 16, 1, 1)),
        ((0, 16, 4, 4), (16, 16, 3, 3)),
    ],
)
def test_what_does_not_fit_is_torchs(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    given = [torch.randn(x), torch.randn(weight)]
    assert not winograd.fits(*given)
    padding = (weight[2] // 2, weight[3] // 2)
    ours = ops.convolution(*given, None, ops.Geometry(padding, winograd=True))
    assert torch.equal(ours, ops.convolution(*given, None, ops.Geometry(padding)))


def test_strides_dilation_groups_and_other_paddings_are_torchs() -> None:
    x, weight = torch.randn(2, 16, 8, 8), torch.randn(16, 16, 3, 3)
    for geometry in (
        ops.Geometry((0, 0), winograd=True),
        ops.Geometry((1, 1), stride=(2, 2), winograd=True),
        ops.Geometry((1, 1), dilation=(2, 2), winograd=True),
        ops.Geometry((1, 1)),
    ):
        assert not geometry.is_winograd(x, weight)


def test_images_that_lie_in_any_way_and_a_gradient_of_a_single_number() -> None:
    x, weight, bias = inputs(3, 16, 16, 4, 4, dtype=torch.float32)
    expected = torch.conv2d(x, weight, bias, padding=1)
    for lying in (x, x.to(memory_format=torch.channels_last), x.mT.contiguous().mT):
        out = ops.convolution(lying, weight, bias, SAME)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        ours = torch.autograd.grad(out.sum(), weight, retain_graph=True)[0]
        torch.testing.assert_close(ours, torch.autograd.grad(expected.sum(), weight, retain_graph=True)[0])


@pytest.mark.parametrize(
    "network",
    [
        convnet((3, 16, 16), 10, ConvNetSettings(width=32)),
        resnet((3, 16, 16), 10, ResNetSettings(), stages=(1, 1, 1), width=16),
    ],
)
def test_networks_use_it_from_version_3_on(network: nn.Module) -> None:
    x = torch.randn(1, 3, 16, 16)

    def count(version: int) -> int:
        fast = kernels.accelerate(network, x, version)
        assert fast is not None
        return sum(is_winograd(layer) for layer in fast.modules())

    assert count(2) == 0
    assert count(3) >= 2

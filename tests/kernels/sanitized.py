"""Runs the kernels, compiled with sanitizers, on shapes drawn at random. A program of its own: a fault ends it."""

from __future__ import annotations

import itertools
import os
import random
import sys

import numpy as np
import torch
from torch import Tensor

from dynafed import kernels
from dynafed.kernels import build, calls, levels, ops, winograd
from dynafed.kernels.activations import FUNCTIONS, Activation
from dynafed.kernels.mlp import MLPTraining
from dynafed.models import ConvNetSettings, convnet
from dynafed.optim import Optimizer

# With optimizations, the sanitizers make the compiler take minutes.
SANITIZED = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TYPES = (torch.float32, torch.float64)


def differentiate(out: Tensor, inputs: list[Tensor]) -> None:
    """First and second derivatives by all inputs."""
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    torch.autograd.grad(sum((each.square().sum() for each in first), torch.zeros(())), inputs, allow_unused=True)


def tensor(rng: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    """One that may lie in any way."""
    made = torch.randn(shape, dtype=dtype)
    if len(shape) == 4:
        made = rng.choice([made, made.to(memory_format=torch.channels_last), made.mT.contiguous().mT])
    return made.detach().requires_grad_()


def rest(rng: random.Random) -> None:
    dtype, channels = rng.choice(TYPES), rng.randint(1, 40)
    groups = rng.choice([0, *(number for number in range(1, channels + 1) if channels % number == 0)])
    pool = rng.choice(ops.POOLS)
    shape = (rng.randint(0, 3), channels, *(rng.randint(1 if pool == "none" else 2, 9) for _ in range(2)))
    z, x, gamma, beta = (tensor(rng, dtype, *size) for size in (shape, shape, (channels,), (channels,)))
    inputs = [z, *([gamma, beta] if groups else []), *([x] if rng.random() < 0.5 else [])]
    kernel = ops.Rest(groups, 1e-5, rng.choice([0.0, 0.1, 1.0]), pool)
    affine = [gamma, beta] if groups else [None, None]
    if z[0:1].numel() > (groups or 0) or not groups:
        differentiate(kernel(z, *affine, *(inputs[-1:] if inputs[-1] is x else [])), inputs)


def block(rng: random.Random) -> None:
    dtype, channels, outputs = rng.choice(TYPES), rng.randint(1, 5), rng.choice([8, 12, 16, 32])
    padding = rng.randint(0, 3)
    size = [rng.randint(max(1, 4 - 2 * padding), 11) for _ in range(2)]
    sizes = ((rng.randint(1, 3), channels, *size), (outputs, channels, 3, 3), (outputs,), (outputs,), (outputs,))
    inputs = [tensor(rng, dtype, *each) for each in sizes]
    wanted = inputs if rng.random() < 0.5 else inputs[1:]
    differentiate(ops.block(*inputs, padding), wanted)


def convolution(rng: random.Random) -> None:
    """By Winograd's method where it fits."""
    dtype = rng.choice(TYPES)
    inputs, outputs = (build.lanes(dtype) * rng.randint(1, 4) for _ in range(2))
    sizes = (rng.randint(1, 5), inputs, *(2 * rng.randint(1, 7) for _ in range(2))), (outputs, inputs, 3, 3), (outputs,)
    x, weight, bias = (tensor(rng, dtype, *size) for size in sizes)
    assert winograd.fits(x, weight)
    differentiate(ops.convolution(x, weight, bias, ops.Geometry((1, 1), winograd=True)), [x, weight, bias])


def network(rng: random.Random) -> None:
    dtype, depth, channels, classes = rng.choice(TYPES), rng.randint(1, 3), rng.choice([1, 3]), rng.randint(2, 20)
    size = [2**depth * rng.randint(1, 3) for _ in range(2)]
    model = convnet((channels, *size), classes, ConvNetSettings(rng.choice([16, 32, 48]), depth)).to(dtype)
    fast = kernels.accelerate(model)
    whole = fast and kernels.ConvNet.of(fast)
    params, x = dict(model.named_parameters()), tensor(rng, dtype, rng.randint(1, 5), channels, *size)
    assert whole
    assert whole.fits(params, x)
    whole.logits(params, x)
    labels = torch.rand(len(x), classes, dtype=dtype)
    for kept in (None, x.new_empty(whole.room(x, classes))):
        whole.gradient(params, x, labels, 1.0, kept)
        whole.product(params, params, x, labels, 1.0, kept)


def mlp(rng: random.Random) -> None:
    sizes = [rng.randint(1, 40), *(rng.randint(1, 64) for _ in range(rng.randint(0, 3))), rng.randint(1, 20)]
    params: list[Tensor] = []
    for inputs, outputs in itertools.pairwise(sizes):
        params += [torch.randn(inputs, outputs).t(), torch.randn(outputs)]
    samples = rng.randint(1, 20)
    between = [Activation(rng.choice(list(FUNCTIONS)), 0.1) for _ in sizes[2:]]
    train = MLPTraining(params, Optimizer(rng.choice(["adam", "adamw"]), params, 0.01), activations=between)
    order = np.random.default_rng(0).permutation(samples)[: rng.randint(1, samples)]
    train(torch.randn(samples, sizes[0]), torch.randint(sizes[-1], (samples,)), order, rng.randint(1, 25))


def main() -> None:
    os.environ.pop("LD_PRELOAD", None)  # the compiler is not to be watched
    build.TIMEOUT = 600
    levels.FLAGS = (*SANITIZED, *(flag for flag in levels.FLAGS if flag != "-O3"))
    if build.library() is None:
        sys.exit("not compiled")
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(40):
        for kind in (rest, block, convolution, network, mlp):
            kind(rng)
    print("clean", flush=True)
    # And a fault would be seen: of more channels than there are.
    z, some = torch.randn(1, 2, 2, 2).to(memory_format=torch.channels_last), torch.ones(2)
    child = os.fork()
    if not child:
        calls.call("norm_forward", z, None, some, some, z, some, some, sizes=(1, 2, 2, 64, 1, 0), reals=(0.0, 1e-5))
        os._exit(0)
    print("seen" if os.waitpid(child, 0)[1] else "not seen")


if __name__ == "__main__":
    main()

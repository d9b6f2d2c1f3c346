"""One synthesis iteration: ours, or the inner loop unrolled with `create_graph` as everybody writes it."""

from __future__ import annotations

import resource
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dynafed.models import ConvNetSettings, convnet
from dynafed.tree import Tree
from peers.protocol import Turns
from peers.torch_side import parameters

Gradients = tuple[Tensor, Tensor, Tensor]
Problem = tuple[nn.Module, Tree, Tree, Tensor, Tensor]
RATE = 0.02


def problem(
    shape: tuple[int, ...], classes: int, width: int, samples: int, dtype: torch.dtype = torch.float32
) -> Problem:
    """A network, two places in its space of weights, and a synthetic set; the same in every process."""
    torch.manual_seed(0)
    model = convnet(shape, classes, ConvNetSettings(width=width))
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    target = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in start.items()}
    x, y = torch.randn(samples, *shape), torch.randn(samples, classes)
    turned = [{name: tensor.to(dtype) for name, tensor in tree.items()} for tree in (start, target)]
    return model.to(dtype), turned[0], turned[1], x.to(dtype), y.to(dtype)


def unrolled(model: nn.Module, start: Tree, target: Tree, x: Tensor, y: Tensor, rate: float, steps: int) -> Gradients:
    """Keep the graph of every inner step, then differentiate through all of them."""
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    lr = torch.tensor(rate, dtype=x.dtype, requires_grad=True)
    params = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    for _ in range(steps):
        loss = F.cross_entropy(functional_call(model, params, (x,)), y.softmax(1))
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {name: param - lr * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
    apart = sum(((params[name] - target[name]) ** 2).sum() for name in target)
    apart = apart / sum(((start[name] - target[name]) ** 2).sum() for name in target)
    return torch.autograd.grad(apart, [x, y, lr])


def ours(model: nn.Module, start: Tree, target: Tree, x: Tensor, y: Tensor, rate: float, steps: int) -> Gradients:
    """The exact adjoint."""
    from dynafed.synthesis import matching_gradient

    return matching_gradient(model, start, target, x, y, rate, steps)[1:]


def prepare(model: nn.Module) -> nn.Module:
    """What `synthesize` does before its first iteration, unless there are very few."""
    from dynafed import execution, kernels

    execution.keep_freed_memory()
    return kernels.accelerate(model) or model


def main() -> None:
    turns = Turns()
    workload, options = turns.task.workload, turns.task.options
    torch.set_num_threads(options["threads"])
    if limit := options.get("limit_gb"):
        resource.setrlimit(resource.RLIMIT_AS, (limit * 2**30, limit * 2**30))
    side: Callable[..., Gradients] = {"ours": ours, "unrolled": unrolled}[options["side"]]
    dtype = getattr(torch, options["dtype"])
    given = problem(workload.shape, workload.classes, workload.width, options["synthetic"], dtype)
    if options["side"] == "ours":
        given = (prepare(given[0]), *given[1:])

    def iteration() -> int:
        found = side(*given, RATE, options["steps"])
        if file := options.get("save"):
            np.savez(file, **{name: part.numpy() for name, part in zip(("dx", "dy", "dlr"), found, strict=True)})
        return options["steps"]

    turns.ready(parameters(given[0]), "dynafed", "torch")
    turns.run(iteration)


if __name__ == "__main__":
    main()

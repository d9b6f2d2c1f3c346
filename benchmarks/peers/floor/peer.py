"""What can hardly be avoided: torch's matrix products or convolutions and the optimizer's memory traffic, nothing else.

No loss, no activations, no gathering of batches, no averaging; buffers are allocated once. Adam reads parameters,
gradients and two moments, and writes parameters and moments: four reads and three writes a step.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

from peers.protocol import Turns, Workload
from peers.torch_side import network, parameters


def products(module: nn.Module, x: Tensor) -> list[Callable[[], object]]:
    """The forward and backward products of a network's layers for one batch, each as a call without arguments."""
    calls: list[Callable[[], object]] = []

    def note(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        if isinstance(layer, nn.Linear):
            calls.extend(_linear(layer, given[0].contiguous(), not calls))
        elif isinstance(layer, nn.Conv2d):
            calls.extend(_convolution(layer, given[0], out, not calls))

    hooks = [layer.register_forward_hook(note) for layer in module.modules()]
    module(x)
    for hook in hooks:
        hook.remove()
    return calls


def _linear(layer: nn.Linear, x: Tensor, first: bool) -> list[Callable[[], object]]:
    # With the weights lying as torch keeps them, the product with a small batch takes three times as long.
    w = layer.weight.t().contiguous()
    out, dw, dx = x.new_empty(len(x), w.shape[1]), torch.empty_like(w), torch.empty_like(x)
    calls = [lambda: torch.mm(x, w, out=out), lambda: torch.mm(x.t(), out, out=dw)]
    return calls if first else [*calls, lambda: torch.mm(out, w.t(), out=dx)]


def _convolution(layer: nn.Conv2d, x: Tensor, out: Tensor, first: bool) -> list[Callable[[], object]]:
    w, ones, zeros = layer.weight, (1, 1), (0, 0)
    stride, padding = layer.stride, layer.padding
    wanted = (not first, True, False)
    return [
        lambda: torch.conv2d(x, w, stride=stride, padding=padding),
        lambda: torch.ops.aten.convolution_backward(out, x, w, None, stride, padding, ones, False, zeros, 1, wanted),
    ]


def traffic(size: int) -> Callable[[], None]:
    """Four reads and three writes of `size` numbers, as Adam needs them."""
    p, g, m, v = torch.zeros(4, size)

    def move() -> None:
        torch.add(p, g, out=p)
        torch.add(m, v, out=m)
        v.zero_()

    return move


def clients_work(workload: Workload) -> Callable[[int], int]:
    """The bare work of so many clients; returns the steps done."""
    module = network(workload)
    sizes = [workload.batch] * (workload.samples // workload.batch)
    if rest := workload.samples % workload.batch:
        sizes.append(rest)
    calls = {size: products(module, torch.randn(size, *workload.shape)) for size in set(sizes)}
    move = traffic(parameters(module))

    def work(clients: int) -> int:
        for _ in range(clients):
            for size in sizes:
                for call in calls[size]:
                    call()
                move()
        return clients * len(sizes)

    return work


def _other(workload: Workload, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    work = clients_work(workload)
    while True:
        pipe.send(work(pipe.recv()))


def main() -> None:
    turns = Turns()
    workload, options = turns.task.workload, turns.task.options
    torch.set_num_threads(options["threads"])
    torch.set_grad_enabled(False)
    others = []
    context = multiprocessing.get_context("spawn")
    for _ in range(options.get("processes", 1) - 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=_other, args=(workload, theirs), daemon=True)
        process.start()
        theirs.close()
        others.append((ours, process))

    def close() -> None:
        for _, process in others:
            assert process.pid
            os.kill(process.pid, signal.SIGKILL)
        raise SystemExit

    turns.closing = close
    work = clients_work(workload)

    def one_round() -> int:
        share = workload.per_round // (1 + len(others))
        for pipe, _ in others:
            pipe.send(share)
        return work(workload.per_round - share * len(others)) + sum(pipe.recv() for pipe, _ in others)

    turns.ready(parameters(network(workload)), "torch")
    turns.run(one_round)


if __name__ == "__main__":
    main()

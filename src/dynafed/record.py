"""Pure functions of tensors, recorded as lists of tensor operations and replayed without Python's and autograd's share.

A replay runs the very kernels that the function would run, in the same order, so it changes no bit: that is checked
when it is recorded, and a function that fails the check, or can't be recorded, simply stays as it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynafed import tree
from dynafed.tree import Tree

log = logging.getLogger("dynafed")

Function = Callable[..., Sequence[Tensor]]

AFTER = 2000
"""Calls before a function is recorded: about as many as cost what recording costs, so short work never pays for it."""


class Recorder:
    """Remembers what it recorded, by a key that must tell apart inputs of different layouts."""

    def __init__(self, after: int = AFTER, on: bool = True) -> None:
        self.after, self.on = after, on
        self.calls: Counter[Hashable] = Counter()
        self.tapes: dict[Hashable, Function | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Recorder, (self.after, self.on)

    def tape(self, key: Hashable, function: Function, inputs: Sequence[Tensor]) -> Function | None:
        """What to call in the function's place, with the same inputs; None while or where there is nothing better."""
        if key not in self.tapes:
            if not self.on:
                return None
            self.calls[key] += 1
            if self.calls[key] < self.after:
                return None
            self.tapes[key] = recorded(function, inputs)
        return self.tapes[key]


def slopes(
    recorder: Recorder, key: Hashable, loss: Callable[..., Tensor], weights: Tree, trained: Sequence[str]
) -> Function:
    """A function of a batch: the gradients of `loss(weights, *batch)` with respect to the trained weights.

    The weights may change in place between two calls. `loss` must be a function of its arguments alone, and the same
    for the same key.
    """

    weights = tree.by_name(weights)

    def function(*tensors: Tensor) -> Sequence[Tensor]:
        named = dict(zip(weights, tensors, strict=False))
        leaves = {name: named[name].detach().requires_grad_() for name in trained}
        return torch.autograd.grad(loss(named | leaves, *tensors[len(named) :]), list(leaves.values()))

    def gradients(*batch: Tensor) -> Sequence[Tensor]:
        inputs = (*weights.values(), *batch)
        shapes = tuple(tensor.shape for tensor in batch)
        return (recorder.tape((key, shapes), function, inputs) or function)(*inputs)

    return gradients


def recorded(function: Function, inputs: Sequence[Tensor]) -> Function | None:
    """The function's operations on inputs like these, or None if they can't stand for it."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

    try:
        with torch.random.fork_rng(devices=[]):  # random layers must not notice
            graph = make_fx(function)(*inputs)
            _simplify(graph.graph)
            graph.recompile()
            replay = torch.inference_mode()(graph.forward)
            same = all(map(torch.equal, function(*inputs), replay(*inputs)))
    except Exception as error:
        # It uses something that is no tensor operation, such as random numbers of its own.
        log.debug("not recorded: %s", (str(error).splitlines() or [type(error).__name__])[0])
        return None
    return replay if same else None


def _simplify(graph: fx.Graph) -> None:
    """Drop what only autograd needed: detached aliases, matrices transposed twice or more than once."""
    aten = torch.ops.aten
    turned: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.t.default:
            source = node.args[0]
            if source.target is aten.t.default:
                node.replace_all_uses_with(source.args[0])
            else:
                node.replace_all_uses_with(turned.setdefault(source, node))
    graph.eliminate_dead_code()
    for node in graph.nodes:
        # Python reaches torch.mm in half the time of torch.ops.aten.mm.default, which is the same kernel.
        name = getattr(node.target, "_opname", "")
        if name in ("view", "expand"):
            node.op, node.target = "call_method", name
        elif callable(quick := getattr(torch, name, None)):
            node.target = quick

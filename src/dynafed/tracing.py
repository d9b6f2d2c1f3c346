"""Traces pure functions of tensors into lists of operations, replayed without the overhead of Python and autograd.

A replay runs the same kernels in the same order, so it changes no bit: that is checked when a function is traced, and
one that fails the check, or can't be traced, is called as it is.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from dynafed import tree
from dynafed.errors import first_line
from dynafed.optim import inference
from dynafed.tree import Tree

log = logging.getLogger("dynafed")

Function = Callable[..., Sequence[Tensor]]

jit: Any = torch.jit  # it has no types

CALLS_BEFORE_FIRST = 2000
"""Calls before the first function is traced: they cost about what tracing costs, so short work never pays for it."""

CALLS_BEFORE_NEXT = 150
"""Calls before the next one is traced: the imports, which are nearly all of the cost, are done."""


class StepTracer:
    """Keeps traced functions by a key that must tell apart inputs of different layouts."""

    def __init__(self, after: int = CALLS_BEFORE_FIRST, on: bool = True) -> None:
        self.after, self.on = after, on
        self.calls: Counter[Hashable] = Counter()
        self.traces: dict[Hashable, Function | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return StepTracer, (self.after, self.on)

    def trace(self, key: Hashable, function: Function, inputs: Sequence[Tensor]) -> Function | None:
        """Returns what to call in the function's place, with the same inputs, in inference mode; None if not traced."""
        if key not in self.traces:
            if not self.on:
                return None
            self.calls[key] += 1
            if self.calls[key] < (min(self.after, CALLS_BEFORE_NEXT) if self.traces else self.after):
                return None
            self.traces[key] = trace_function(function, inputs)
        return self.traces[key]


def gradient_function(
    tracer: StepTracer, key: Hashable, loss: Callable[..., Tensor], weights: Tree, trained: Sequence[str]
) -> Function:
    """Returns a function of a batch: the gradients of `loss(weights, *batch)` with respect to the trained weights.

    The weights may change in place between two calls. `loss` must be a function of its arguments alone, and the same
    for the same key.
    """

    weights = tree.sorted_by_name(weights)

    def function(*tensors: Tensor) -> Sequence[Tensor]:
        named = dict(zip(weights, tensors, strict=False))
        leaves = {name: named[name].detach().requires_grad_() for name in trained}
        return torch.autograd.grad(loss(named | leaves, *tensors[len(named) :]), list(leaves.values()))

    def gradients(*batch: Tensor) -> Sequence[Tensor]:
        inputs = (*weights.values(), *batch)
        shapes = tuple(tensor.shape for tensor in batch)
        traced = tracer.trace((key, shapes), function, inputs)
        if traced is None:
            return function(*inputs)
        with inference(True):
            return traced(*inputs)

    return gradients


def trace_function(function: Function, inputs: Sequence[Tensor]) -> Function | None:
    """The function's operations on inputs like these, to be run in inference mode; None if they differ from it."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

    inputs = [tensor.detach() for tensor in inputs]  # what is given twice would be taken for a single input
    try:
        with torch.random.fork_rng(devices=[]):  # random layers must not notice
            graph = make_fx(function)(*inputs)
            _simplify(graph.graph)
            graph.recompile()
            drawn = torch.get_rng_state()
            expected = function(*inputs)
            with inference(True):
                for replay in (_scripted(graph, inputs), graph.forward):
                    torch.set_rng_state(drawn)  # random layers draw the same in a replay
                    if replay and all(map(torch.equal, expected, replay(*inputs))):
                        return replay
    except Exception as error:
        # It uses something that is no tensor operation.
        log.debug("not traced: %s", first_line(error))
    return None


def _scripted(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Function | None:
    """The same operations one after the other without Python, which takes half the time that is not the kernels' own.

    TorchScript is deprecated and nothing depends on it: None if it can't, or is no longer there.
    """
    try:
        with _kernel_by_kernel(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            script: Function = jit.trace(
                lambda *tensors: tuple(graph.forward(*tensors)), tuple(inputs), check_trace=False
            )
            script(*inputs)  # only now it is decided how it is run
    except Exception as error:
        log.debug("not scripted: %s", first_line(error))
        return None
    return script


@contextmanager
def _kernel_by_kernel() -> Iterator[None]:
    """TorchScript that is first called in here runs as written: its optimizer would change kernels and bits."""
    profiling = torch._C._jit_set_profiling_mode(False)
    try:
        with jit.optimized_execution(False):
            yield
    finally:
        torch._C._jit_set_profiling_mode(profiling)


def _simplify(graph: fx.Graph) -> None:
    """Drop what only autograd needed: detached aliases, matrices transposed twice or more than once."""
    aten = torch.ops.aten
    transposed: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.t.default:
            source = node.args[0]
            if source.target is aten.t.default:
                node.replace_all_uses_with(source.args[0])
            else:
                node.replace_all_uses_with(transposed.setdefault(source, node))
    graph.eliminate_dead_code()
    for node in graph.nodes:
        # Python reaches torch.mm in half the time of torch.ops.aten.mm.default, which is the same kernel.
        name = getattr(node.target, "_opname", "")
        if name in ("view", "expand"):
            node.op, node.target = "call_method", name
        elif callable(quick := getattr(torch, name, None)):
            node.target = quick

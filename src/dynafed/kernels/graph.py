"""Finds in the traced graph of anybody's module what our kernels can do, and runs it on them.

A module is traced by torch.fx, its blocks are replaced, and what is left runs as it was written. What can't be traced,
or does more than to compute its output, stays with torch.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dynafed.errors import first_line
from dynafed.kernels.activations import Activation, of_layer, of_node
from dynafed.kernels.build import CPP, library
from dynafed.kernels.structure import are_mlp, block_at, is_plain, is_winograd

log = logging.getLogger("dynafed")

CPU = torch.device("cpu")
MULTIPLE = 4
"""Of what the number of channels must be a multiple: with others, the kernels are no faster than torch's."""


@dataclass(frozen=True)
class Value:
    """What an earlier step of a plan made."""

    number: int


@dataclass(frozen=True)
class Step:
    """One step of a plan: what is called, and with what."""

    run: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    done: tuple[int, ...] = ()
    """Values that nobody needs after it."""


@dataclass(frozen=True)
class Submodule:
    """Calls one of the module's own."""

    name: str

    def __call__(self, root: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What it returns."""
        return root.get_submodule(self.name)(*args, **kwargs)


@dataclass(frozen=True)
class Attribute:
    """Reads a parameter or buffer."""

    name: str

    def __call__(self, root: nn.Module) -> Any:
        """What it is at this moment."""
        return operator.attrgetter(self.name)(root)


@dataclass(frozen=True)
class Method:
    """Calls a method of its first argument."""

    name: str

    def __call__(self, root: nn.Module, owner: Any, *args: Any, **kwargs: Any) -> Any:
        """What it returns."""
        return getattr(owner, self.name)(*args, **kwargs)


@dataclass(frozen=True)
class Function:
    """Calls a function by its place, because not all of torch's can be pickled."""

    module: str
    name: str

    def __call__(self, root: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What it returns."""
        return _function(self.module, self.name)(*args, **kwargs)


@dataclass(frozen=True)
class Convolution:
    """A convolution of a module, channels last."""

    name: str

    def __call__(self, root: nn.Module, x: Tensor) -> Tensor:
        """Its output."""
        from dynafed.kernels.ops import Geometry, convolution

        conv: Any = root.get_submodule(self.name)
        geometry = Geometry(conv.padding, conv.stride, conv.dilation, conv.groups, is_winograd(conv))
        return convolution(x, conv.weight, conv.bias, geometry)


@dataclass(frozen=True)
class Rest:
    """What follows it, in one kernel: the norm (its name; none if empty), sum, activation and pooling."""

    name: str
    low: float = 1.0
    """The activation's slope below zero; 1 is no activation."""
    pool: str = "none"
    sum: bool = False

    def __call__(self, root: nn.Module, z: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Its output."""
        from dynafed.kernels import ops

        norm: Any = root.get_submodule(self.name) if self.name else None
        if norm is None:
            return ops.Rest(0, 0.0, self.low, self.pool)(z, None, None, shortcut)
        groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else norm.num_features
        return ops.Rest(groups, norm.eps, self.low, self.pool)(z, norm.weight, norm.bias, shortcut)


@dataclass(frozen=True)
class Block:
    """A convolution, its instance norm, ReLU and average pooling, on the kernels that were made for these."""

    conv: str
    norm: str

    def __call__(self, root: nn.Module, x: Tensor) -> Tensor:
        """Its output."""
        from dynafed.kernels.ops import block_of

        return block_of(x, root.get_submodule(self.conv), root.get_submodule(self.norm))


@dataclass(frozen=True)
class Plan:
    """A module's forward pass, step by step. Value 0 is the input, the last one the output."""

    steps: tuple[Step, ...]
    channels: int
    """The most that one of our kernels has to do with; 0 if there is nothing for them."""

    def __call__(self, root: nn.Module, x: Tensor) -> Any:
        """The output."""
        values: list[Any] = [x]
        for step in self.steps:
            args = _filled(step.args, values)
            kwargs = _filled(step.kwargs, values) if step.kwargs else {}
            values.append(step.run(root, *args, **kwargs))
            for number in step.done:
                values[number] = None
        return values[-1]

    def describe(self, root: nn.Module) -> str:
        """What runs on what."""
        kinds = [step.run for step in self.steps]
        rests = [kind for kind in kinds if isinstance(kind, Rest)]
        blocks = sum(isinstance(kind, Block) for kind in kinds)
        others = sorted(
            {_title(kind, root) for kind in kinds if isinstance(kind, Submodule | Method | Function)} - {""}
        )
        count = {
            "whole blocks": blocks,
            "norms": sum(bool(rest.name) for rest in rests),
            "sums": sum(rest.sum for rest in rests),
            "activations": sum(rest.low != 1 for rest in rests),
            "poolings": sum(rest.pool != "none" for rest in rests),
        }
        said = [", ".join(f"{number} {what}" for what, number in count.items() if number)]
        convolutions: list[Any] = [root.get_submodule(kind.name) for kind in kinds if isinstance(kind, Convolution)]
        ours = sum(is_winograd(conv) for conv in convolutions)
        if ours:
            said.append(f"{ours} convolutions by Winograd's method")
        if len(convolutions) > ours:
            said.append(f"torch's: {len(convolutions) - ours} convolutions, channels last")
        said += others
        return ", ".join(filter(None, said))


class Accelerated:
    """Stands in a module for its `forward`: the same on our kernels, where they can take it."""

    def __init__(self, module: nn.Module, plans: dict[bool, Plan]) -> None:
        self.module, self.plans = module, plans

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        if len(args) == 1 and not kwargs and self._can_run(args[0]):
            return self.plans[self.module.training](self.module, args[0])
        return type(self.module).forward(self.module, *args, **kwargs)

    def _can_run(self, x: Any) -> bool:
        """Whether the kernels can take it: the network may have been moved or sent away since it was accelerated."""
        weight = next(self.module.parameters())
        return (
            isinstance(x, Tensor)
            and x.device == weight.device == CPU
            and x.dtype == weight.dtype
            and x.dtype in CPP
            and library() is not None
        )


def accelerated(network: nn.Module) -> nn.Module | None:
    """A copy of the network in which each part with something for our kernels runs on them; None if none has."""
    parts = dict(plans(network))
    if not parts:
        return None
    fast = copy.deepcopy(network)
    for name, found in parts.items():
        module = fast.get_submodule(name)
        module.__dict__["forward"] = Accelerated(module, found)
    return fast


def described(network: nn.Module) -> Iterator[str]:
    """A line for each part of an accelerated network."""
    for name, module in network.named_modules():
        if isinstance(forward := vars(module).get("forward"), Accelerated):
            yield f"{name or 'the network'}: {forward.plans[True].describe(module)}"


def plans(network: nn.Module, name: str = "") -> Iterator[tuple[str, dict[bool, Plan]]]:
    """The largest parts of a network that can be traced and have something for our kernels: their names and plans.

    Each has a plan for training and one for evaluation.
    """
    if _is_leaf(network):
        return
    # Methods that want features call the two parts of such a network one by one.
    split = set(dict(network.named_children())) == {"features", "head"}
    graphs = None if split else {mode: traced(network, mode) for mode in (True, False)}
    if graphs and (train := graphs[True]) and (evaluate := graphs[False]):
        fast, slow = _plan(train, network), _plan(evaluate, network)
        if fast and slow and fast.channels:
            yield name, {True: fast, False: slow}
        return
    for child, module in network.named_children():
        yield from plans(module, f"{name}.{child}".lstrip("."))


class Chain:
    """Stands in a module for its `forward`: linear layers with activations between them, on flattened samples."""

    def __init__(self, module: nn.Module, layers: Sequence[str], activations: Sequence[Activation]) -> None:
        self.module, self.layers, self.activations = module, layers, activations

    def __call__(self, x: Tensor) -> Tensor:
        """The last layer's output."""
        x = x.flatten(1)
        for number, name in enumerate(self.layers):
            x = self.module.get_submodule(name)(self.activations[number - 1](x) if number else x)
        return x


def mlp_activations(network: nn.Module, x: Tensor, version: int) -> tuple[Activation, ...]:
    """Those of what `structure.mlp_activations` looks for, by its graph, and its outputs for samples like these."""
    layers, between = _linear_chain(network)
    if not layers or not are_mlp(network, [network.get_submodule(name) for name in layers], between, version):
        return ()
    chained = copy.deepcopy(network)
    chained.__dict__["forward"] = Chain(chained, layers, between)
    return tuple(between) if agree(chained, network, x) else ()


def _linear_chain(network: nn.Module) -> tuple[list[str], list[Activation]]:
    """The names of the linear layers in a graph that is a chain of them, and what is between; empty if it isn't."""
    nothing = list[str](), list[Activation]()
    known = (nn.Linear, nn.Flatten)
    if any(type(layer) not in known and not of_layer(layer) for layer in network.modules() if _is_leaf(layer)):
        return nothing
    if (graph := traced(network, True)) is None:
        return nothing
    node, linear = next(iter(graph.nodes)), False
    layers, between = list[str](), list[Activation]()
    while node.op != "output":
        if type(_layer(node, network)) is nn.Linear and not linear:
            layers.append(str(node.target))
            linear = True
        elif (found := of_node(node, _layer(node, network))) and linear:
            between.append(found)
            linear = False
        elif node.op != "placeholder" and (layers or not _flattens(node, network)):
            return nothing
        users = [user for user in node.users if not _measures(user)]
        if len(users) != 1:
            return nothing
        node = users[0]
    return (layers, between) if linear else nothing


def traced(module: nn.Module, training: bool) -> fx.Graph | None:
    """The module's graph in this mode, or None if it can't be told that it is always the same."""
    if not all(map(is_plain, module.modules())):
        return None
    try:
        module = copy.deepcopy(module).train(training)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        before = _state(module)
        with torch.random.fork_rng(devices=[]):
            graph = fx.Tracer().trace(module)
            again = fx.Tracer().trace(module)
    except Exception as error:
        # It looks at its values, or is no function of tensors: whatever a user's forward can do.
        log.debug("%s can't be traced: %s", type(module).__name__, first_line(error))
        return None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    same = (
        str(graph) == str(again)  # no random choices
        and _state(module) == before  # nothing is remembered
        and len(inputs) == 1
        and isinstance(output.args[0], fx.Node)
        and all(node.target in tensors for node in graph.nodes if node.op == "get_attr")
    )
    return graph if same else None


def agree(one: nn.Module, other: nn.Module, x: Tensor) -> bool:
    """Whether two networks with the same parameters have the same outputs and gradients, at values like these.

    In double precision; layers that are random are switched off.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            x = torch.randn(2, *x.shape[1:], dtype=torch.float64)
            noise = {name: torch.randn(p.shape, dtype=p.dtype) for name, p in one.named_parameters()}
            found = [_outcome(copy.deepcopy(network).double(), x, noise) for network in (one, other)]
    except Exception as error:
        log.debug("not compared: %s", first_line(error))
        return False
    return all(map(_close, *found))


def _outcome(network: nn.Module, x: Tensor, noise: dict[str, Tensor]) -> list[Tensor]:
    """Outputs and gradients in both modes, with other parameters than it was given."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.add_(noise[name], alpha=0.1)
    found = []
    parameters = [parameter.requires_grad_() for parameter in network.parameters()]
    for mode in (True, False):
        network.train(mode)
        for layer in network.modules():
            if isinstance(layer, nn.modules.dropout._DropoutNd):
                layer.eval()
        leaf = x.clone().requires_grad_()
        outputs = network(leaf)
        down = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
        found += [outputs, *torch.autograd.grad(outputs, [leaf, *parameters], down, materialize_grads=True)]
    return found


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).norm() <= 1e-6 * (1 + other.norm()))


def _state(module: nn.Module) -> list[Any]:
    """What a forward pass could change, such as counters or a remembered output."""
    found: list[Any] = []
    for part in module.modules():
        held = {**vars(part), **part._parameters, **part._buffers}
        found += [(name, id(value), getattr(value, "_version", 0)) for name, value in held.items()]
        found += [len(value) for value in held.values() if isinstance(value, list | dict | set)]
    return found


def _is_leaf(module: nn.Module) -> bool:
    """Whether it is one of torch's layers."""
    return fx.Tracer().is_leaf_module(module, "") and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _plan(graph: fx.Graph, root: nn.Module) -> Plan | None:
    """The graph as a plan with its blocks on our kernels; None if a function in it has no name."""
    fused = _fused(graph, root)
    channels, steps = 0, list[Step]()
    numbers: dict[fx.Node, int] = {}
    taken = {node for kernel in fused.values() for node in kernel.nodes}
    for node in graph.nodes:
        if node.op == "placeholder":
            numbers[node] = 0
            continue
        run: Any
        args, kwargs = node.args, node.kwargs
        if node in fused:
            run, args, kwargs = fused[node].run, fused[node].inputs, {}
            channels = max(channels, fused[node].channels)
        elif node in taken:
            continue
        elif node.op == "output":
            args, run = (node.args[0],), Function("dynafed.kernels.graph", "_identity")
        elif node.op == "call_module":
            run = Convolution(node.target) if _convolution(node, root) else Submodule(str(node.target))
        elif node.op == "get_attr":
            run, args = Attribute(str(node.target)), ()
        elif node.op == "call_method":
            # Where images lie channels last, there is no view of them as vectors.
            views = node.target == "view" and not any(isinstance(arg, torch.dtype) for arg in node.args)
            run = Method("reshape" if views else str(node.target))
        elif (run := _place(node.target)) is None:
            return None
        if isinstance(run, Convolution):
            args, kwargs = (_input(node),), {}
        steps.append(Step(run, _numbered(tuple(args), numbers), _numbered(dict(kwargs), numbers)))
        numbers[node] = len(steps)
    return Plan(tuple(_forgetting(steps)), channels)


@dataclass(frozen=True)
class Fused:
    """A chain of nodes that one kernel can do."""

    nodes: tuple[fx.Node, ...]
    run: Rest | Block
    inputs: tuple[fx.Node, ...]
    channels: int


def _fused(graph: fx.Graph, root: nn.Module) -> dict[fx.Node, Fused]:
    """Those of a graph, by their last nodes."""
    found: dict[fx.Node, Fused] = {}
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        norm, conv = _norm(node, root), _convolution(node, root)
        channels = norm or (conv.out_channels if conv else 0)
        if not channels or channels % MULTIPLE or (conv and _norm(_only_user(node), root)):
            continue
        chain, run = [node], Rest(str(node.target) if norm else "")
        inputs = [_input(node) if norm else node]

        if (user := _free_user(chain, taken)) and (other := _summand(user, node)):
            run = replace(run, sum=True)
            inputs.append(other)
            chain.append(user)
        if (user := _free_user(chain, taken)) and (low := _slope_below_zero(user, root)) is not None:
            run = replace(run, low=low)
            chain.append(user)
        if (user := _free_user(chain, taken)) and (pool := _pool(user, root)):
            run = replace(run, pool=pool)
            chain.append(user)
        if conv:  # which is a step of its own
            chain = chain[1:]
            if not run.sum and run.pool == "none":
                continue
        kernel = Fused(tuple(chain), run, tuple(inputs), channels)
        taken |= set(chain)
        found[chain[-1]] = _block(kernel, root) or kernel
    return found


def _free_user(chain: list[fx.Node], taken: set[fx.Node]) -> fx.Node | None:
    """Who alone uses what a chain has come to, unless that is another chain's."""
    user = _only_user(chain[-1])
    return None if user in taken else user


def _block(kernel: Fused, root: nn.Module) -> Fused | None:
    """The same with the convolution before it, if there is a kernel for such blocks."""
    run, (conv, *others), norm = kernel.run, kernel.inputs, kernel.nodes[0]
    if run != Rest(str(norm.target), 0.0, "mean") or others or not _convolution(conv, root) or len(conv.users) > 1:
        return None
    layers = [root.get_submodule(str(node.target)) for node in (conv, norm)] + [nn.ReLU(), nn.AvgPool2d(2)]
    if block_at(layers, 0) is None:
        return None
    run = Block(str(conv.target), str(norm.target))
    return Fused((conv, *kernel.nodes), run, (_input(conv),), kernel.channels)


def _layer(node: Any, root: nn.Module) -> nn.Module | None:
    return root.get_submodule(str(node.target)) if isinstance(node, fx.Node) and node.op == "call_module" else None


def _input(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs["input"]


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _convolution(node: Any, root: nn.Module) -> nn.Conv2d | None:
    layer = _layer(node, root)
    fits = (
        type(layer) is nn.Conv2d
        and layer.padding_mode == "zeros"
        and isinstance(layer.padding, tuple)
        and layer.weight.dtype in CPP
    )
    return layer if fits and isinstance(layer, nn.Conv2d) else None


def _norm(node: Any, root: nn.Module) -> int:
    """The channels of a group norm or instance norm; 0 if it is something else."""
    layer = _layer(node, root)
    if type(layer) is nn.GroupNorm:
        return layer.num_channels
    return layer.num_features if type(layer) is nn.InstanceNorm2d and not layer.track_running_stats else 0


def _summand(node: fx.Node, one: fx.Node) -> fx.Node | None:
    """What is added to a node, if that is what the other node does."""
    functions = (operator.add, operator.iadd, torch.add)
    adds = node.op == "call_function" and node.target in functions
    adds = adds or (node.op == "call_method" and node.target in ("add", "add_"))
    if not adds or len(node.args) != 2 or node.kwargs:
        return None
    other = node.args[1] if node.args[0] is one else node.args[0]
    in_place = node.target in (operator.iadd, "add_")
    # Whoever else uses what is changed in place would see the sum.
    fits = isinstance(other, fx.Node) and other is not one and not (in_place and len(other.users) > 1)
    return other if fits and isinstance(other, fx.Node) else None


def _slope_below_zero(node: fx.Node, root: nn.Module) -> float | None:
    """That of a ReLU or leaky ReLU."""
    found = of_node(node, _layer(node, root))
    return found.low if found and found.name in ("relu", "leaky_relu") else None


def _pool(node: fx.Node, root: nn.Module) -> str:
    """Which pooling over windows of 2x2 it is, if any."""
    layer = _layer(node, root)
    if type(layer) in (nn.MaxPool2d, nn.AvgPool2d):
        kind = "max" if type(layer) is nn.MaxPool2d else "mean"
        given = {name: getattr(layer, name) for name in POOLING if hasattr(layer, name)}
    elif node.op == "call_function" and node.target in (F.max_pool2d, torch.max_pool2d, F.avg_pool2d):
        kind = "mean" if node.target is F.avg_pool2d else "max"
        order = ("kernel_size", "stride", "padding", *(("dilation",) if kind == "max" else ()), "ceil_mode")
        given = dict(zip(order, node.args[1:], strict=False)) | dict(node.kwargs)
        if len(node.args) > 1 + len(order):
            return ""
    else:
        return ""
    rest = {"input", *POOLING}
    fits = given.keys() <= rest and all(given.get(name, ok[0]) in ok for name, ok in POOLING.items())
    return kind if fits and "kernel_size" in given else ""


POOLING: dict[str, tuple[Any, ...]] = {
    "kernel_size": (2, (2, 2), [2, 2]),
    "stride": (None, 2, (2, 2), [2, 2]),
    "padding": (0, (0, 0), [0, 0]),
    "dilation": (1, (1, 1), [1, 1]),
    "ceil_mode": (False,),
    "return_indices": (False,),
    "count_include_pad": (True, False),
    "divisor_override": (None,),
}
"""Of a pooling, what the kernels can do."""


def _flattens(node: fx.Node, root: nn.Module) -> bool:
    """Whether it may turn samples into vectors; that it does is seen from the outputs."""
    names = ("flatten", "view", "reshape")
    functions = (torch.flatten, torch.reshape)
    return (
        type(_layer(node, root)) is nn.Flatten
        or (node.op == "call_method" and node.target in names)
        or (node.op == "call_function" and node.target in functions)
    )


def _measures(node: fx.Node) -> bool:
    """Whether it only asks for a size."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    return node.op == "call_function" and node.target is getattr


def _place(function: Any) -> Function | None:
    """Where a function can be found again."""
    name = getattr(function, "__name__", "")
    for module in ("torch", "torch.nn.functional", "operator", "builtins", "math", getattr(function, "__module__", "")):
        try:
            if module and _function(module, name) is function:
                return Function(module, name)
        except (AttributeError, ImportError):
            continue
    return None


@functools.cache
def _function(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _identity(x: Any) -> Any:
    return x


def _numbered(given: Any, numbers: dict[fx.Node, int]) -> Any:
    """The same with values in the place of nodes."""

    def value(node: fx.Node) -> Any:
        return Value(numbers[node])

    return fx.node.map_arg(given, value)


def _filled(given: Any, values: list[Any]) -> Any:
    """The same with what the values are."""
    if isinstance(given, Value):
        return values[given.number]
    if isinstance(given, tuple | list):
        return type(given)([_filled(each, values) for each in given])
    if isinstance(given, dict):
        return {name: _filled(each, values) for name, each in given.items()}
    if isinstance(given, slice):
        return slice(*(_filled(each, values) for each in (given.start, given.stop, given.step)))
    return given


def _used(given: Any) -> Iterator[int]:
    """The values' numbers in some arguments."""
    if isinstance(given, Value):
        yield given.number
    elif isinstance(given, tuple | list | dict | slice):
        if isinstance(given, slice):
            given = (given.start, given.stop, given.step)
        for part in given.values() if isinstance(given, dict) else given:
            yield from _used(part)


def _forgetting(steps: list[Step]) -> Iterator[Step]:
    """The steps, each with the values whose last use it is."""
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        last |= dict.fromkeys((*_used(step.args), *_used(step.kwargs)), number)
    for number, step in enumerate(steps):
        yield replace(step, done=tuple(value for value, used in last.items() if used == number))


def _title(run: Any, root: nn.Module) -> str:
    """What is named to the user: no bookkeeping."""
    if isinstance(run, Submodule):
        kind = type(root.get_submodule(run.name))
        return "" if kind is nn.Identity else kind.__name__
    return "" if run.name in ("_identity", "getitem", "getattr", "size") else str(run.name)

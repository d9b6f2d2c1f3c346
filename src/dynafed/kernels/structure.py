"""Finds by a network's structure what our kernels can do of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dynafed.kernels.activations import RELU, Activation, of_layer
from dynafed.kernels.build import CPP, lanes
from dynafed.models import Classifier

Block = tuple[nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.AvgPool2d]

BLOCK = (nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.AvgPool2d)

ANY_CHAIN = 5
"""The version from which hidden layers may have any number of units, and other activations than ReLU."""


def sequentials(network: nn.Module) -> dict[str, nn.Sequential]:
    """The parts of a network that are plain `nn.Sequential`, by name."""
    return {name: part for name, part in network.named_modules() if type(part) is nn.Sequential and is_plain(part)}


def conv_blocks(layers: nn.Sequential) -> list[Block]:
    """The blocks in these layers, in order, that our kernels can do."""
    children = list(layers)
    return [block for start in range(len(children)) if (block := block_at(children, start)) is not None]


def is_covered(network: nn.Module, version: int) -> bool:
    """Whether nothing in it is left for those who look at its graph."""
    blocks = [block for part in sequentials(network).values() for block in conv_blocks(part)]
    known = {id(layer) for block in blocks for layer in block}
    others = (nn.Conv2d, nn.GroupNorm, nn.InstanceNorm2d)
    left = any(isinstance(layer, others) and id(layer) not in known for layer in network.modules())
    return bool(mlp_activations(network, version)) or (bool(blocks) and not left)


def block_at(layers: list[nn.Module], start: int) -> Block | None:
    """The block of convolution, instance norm, ReLU and pooling that begins at this layer, if our kernels can do it."""
    part = layers[start : start + len(BLOCK)]
    if tuple(type(layer) for layer in part) != BLOCK or not all(map(is_plain, part)):
        return None
    conv, norm, relu, pool = part
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.GroupNorm)
    assert isinstance(relu, nn.ReLU)
    assert isinstance(pool, nn.AvgPool2d)
    fits = (
        conv.kernel_size == (3, 3)
        and conv.stride == conv.dilation == (1, 1)
        and conv.groups == 1
        and isinstance(conv.padding, tuple)
        and conv.padding[0] == conv.padding[1]
        and conv.padding_mode == "zeros"
        and conv.bias is not None
        and norm.affine
        and norm.num_groups == norm.num_channels == conv.out_channels
        and pool.kernel_size in (2, (2, 2))
        and pool.stride in (2, (2, 2))
        and pool.padding in (0, (0, 0))
        and not pool.ceil_mode
        and conv.weight.device.type == "cpu"
        and conv.weight.dtype in CPP
        and conv.out_channels % lanes(conv.weight.dtype) == 0
    )
    return (conv, norm, relu, pool) if fits else None


def mlp_activations(network: nn.Module, version: int) -> tuple[Activation, ...]:
    """Those of a chain of linear layers, all trained, in single precision on the CPU; empty if it is something else."""
    chain = _chain(network)
    if chain and type(chain[0]) is nn.Flatten and chain[0].start_dim == 1 and chain[0].end_dim == -1:
        chain = chain[1:]
    between = [found for layer in chain[1::2] if (found := of_layer(layer))]
    if len(chain) != 2 * len(between) + 1 or not are_mlp(network, chain[::2], between, version):
        return ()
    return tuple(between)


def are_mlp(network: nn.Module, layers: Sequence[nn.Module], between: Sequence[Activation], version: int) -> bool:
    """Whether these layers, one after the other with activations between them, are all of a network that is trained."""
    linear = [layer for layer in layers if type(layer) is nn.Linear]
    parameters = list(network.parameters())
    wanted = [parameter for layer in linear for parameter in (layer.weight, layer.bias)]
    return (
        len(linear) == len(layers) > 1
        and list(map(id, wanted)) == list(map(id, parameters))
        and not any(True for _ in network.buffers())
        and all(p.requires_grad and p.dtype == torch.float32 and p.device.type == "cpu" for p in parameters)
        and (version >= ANY_CHAIN or (set(between) == {RELU} and _whole(linear[:-1])))
    )


def _whole(hidden: Sequence[nn.Linear]) -> bool:
    return all(layer.out_features % lanes(torch.float32) == 0 for layer in hidden)


def _chain(module: nn.Module) -> list[nn.Module]:
    """The layers that run one after the other."""
    if not is_plain(module):
        return []
    if type(module) is nn.Sequential:
        return [layer for child in module for layer in _chain(child)]
    if type(module) is Classifier:
        return [*_chain(module.features), *_chain(module.head)]
    return [module]


def is_plain(module: nn.Module) -> bool:
    """Whether nothing was hooked onto it."""
    return not (module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"))


def use_winograd(network: nn.Module) -> None:
    """Let the convolutions of an accelerated network be done by Winograd's method, where images have even sides."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            sizes = (layer.kernel_size, layer.padding, layer.stride, layer.dilation, layer.groups)
            whole = all(n % lanes(layer.weight.dtype) == 0 for n in (layer.in_channels, layer.out_channels))
            layer.__dict__["winograd"] = whole and sizes == ((3, 3), (1, 1), (1, 1), (1, 1), 1)


def is_winograd(conv: nn.Module) -> bool:
    """Whether it was decided so by `use_winograd`."""
    return bool(vars(conv).get("winograd"))

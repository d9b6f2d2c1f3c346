"""Algebra on named tensors. A model's weights, a gradient, a control variate: all are a `Tree`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping

import safetensors.torch
import torch
from torch import Tensor

Tree = dict[str, Tensor]


def map_tensors(function: Callable[..., Tensor], *trees: Mapping[str, Tensor]) -> Tree:
    """Apply `function` name by name."""
    return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}


def clone_contiguous(tree: Mapping[str, Tensor]) -> Tree:
    """Returns a contiguous copy that shares no memory with `tree` (a plain `.cpu()` would, on a CPU)."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tree.items()}


def clone(tree: Mapping[str, Tensor]) -> Tree:
    """Returns a copy that shares no memory with `tree` and has the same strides."""
    return {name: tensor.detach().clone() for name, tensor in tree.items()}


def to(tree: Mapping[str, Tensor], device: torch.device | str) -> Tree:
    """The same tensors on `device`, contiguous: the bits of a product depend on the memory layout of its factors."""
    return {name: tensor.to(device).contiguous() for name, tensor in tree.items()}


def column_major(tree: Mapping[str, Tensor], names: Collection[str]) -> Tree:
    """The same tensors; the matrices with these names are stored column by column."""
    return {name: tensor.t().contiguous().t() if name in names else tensor for name, tensor in tree.items()}


def only(tree: Mapping[str, Tensor], names: Collection[str]) -> Tree:
    """The tensors with these names."""
    return {name: tree[name] for name in names}


def without(tree: Mapping[str, Tensor], names: Collection[str]) -> Tree:
    """The tensors with other names than these."""
    return {name: tensor for name, tensor in tree.items() if name not in names}


def floats(tree: Mapping[str, Tensor]) -> Tree:
    """The tensors in floating point."""
    return {name: tensor for name, tensor in tree.items() if tensor.is_floating_point()}


def sorted_by_name(tree: Mapping[str, Tensor]) -> Tree:
    """The same tensors in the order of their names."""
    return {name: tree[name] for name in sorted(tree)}


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another dtype; what was averaged of whole numbers becomes the nearest one."""
    return (tensor.round() if tensor.is_floating_point() and not dtype.is_floating_point else tensor).to(dtype)


def difference(tree: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Tree:
    """What was added to `start`, of the tensors in floating point."""
    return {name: tensor - start[name] for name, tensor in tree.items() if tensor.is_floating_point()}


def norm(tree: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of all numbers, in double precision; infinite if its square can't be represented."""
    try:
        return math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in tree.values()))
    except OverflowError:
        return math.inf


def moved(start: Mapping[str, Tensor], end: Mapping[str, Tensor], share: float) -> Tree:
    """`share` of the way from `start` to `end`; whole numbers are those of `end`. All of it is `end`, bit for bit."""
    if share == 1:
        return dict(end)
    return {
        name: start[name] + share * (tensor - start[name]) if tensor.is_floating_point() else tensor
        for name, tensor in end.items()
    }


def nbytes(tree: Mapping[str, Tensor]) -> int:
    """How many bytes the tensors take when sent."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tree.values())


def nest(trees: Mapping[str, Mapping[str, Tensor]]) -> Tree:
    """Join several trees into one; the names become `outer/inner`."""
    return {f"{outer}/{inner}": tensor for outer, tree in trees.items() for inner, tensor in tree.items()}


def unnest(tree: Mapping[str, Tensor]) -> dict[str, Tree]:
    """The inverse of `nest`."""
    trees: dict[str, Tree] = {}
    for name, tensor in tree.items():
        outer, _, inner = name.partition("/")
        trees.setdefault(outer, {})[inner] = tensor
    return trees


def digest(tree: Mapping[str, Tensor]) -> str:
    """A checksum of names, shapes, dtypes and bits: equal if and only if the trees are equal, bit for bit."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(tree):
        tensor = tree[name].detach().cpu().contiguous()
        hasher.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def pack(tree: Mapping[str, Tensor]) -> bytes:
    """The tree as safetensors bytes."""
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in tree.items()})


def seal(tree: Mapping[str, Tensor], notes: Mapping[str, str]) -> bytes:
    """The tree as safetensors bytes whose header has these notes and a checksum of both."""
    plain = {name: tensor.contiguous() for name, tensor in tree.items()}
    return safetensors.torch.save(plain, {**notes, CHECKSUM: _seal_digest(plain, notes)})


def unseal(blob: bytes) -> tuple[Tree, dict[str, str]]:
    """The inverse of `seal`; raises `ValueError` if anything was changed. Files without a checksum are older."""
    tree, length = unpack(blob), int.from_bytes(blob[:8], "little")
    notes: dict[str, str] = json.loads(blob[8 : 8 + length]).get("__metadata__", {})
    checksum = notes.pop(CHECKSUM, None)
    if checksum is not None and checksum != _seal_digest(tree, notes):
        raise ValueError("its checksum says that it was changed")
    return tree, notes


CHECKSUM = "checksum"
"""The note that holds it."""


def _seal_digest(tree: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    text = json.dumps(dict(sorted(notes.items())))
    return hashlib.blake2b(f"{digest(tree)}{text}".encode(), digest_size=16).hexdigest()


def unpack(blob: bytes) -> Tree:
    """The inverse of `pack`, sorted by name: safetensors loads them in another order each time.

    The tensors are aligned copies, so that arithmetic on them gives the same bits.
    """
    return clone_contiguous(sorted_by_name(safetensors.torch.load(blob)))

"""What crosses between server and clients, and the check that every update must pass before it counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dynafed import tree
from dynafed.errors import printable
from dynafed.tree import Tree


@dataclass(frozen=True)
class Broadcast:
    """From the server to a client: the global model, and what each method adds, under the method's own name."""

    round: int
    model: Tree
    extras: Mapping[str, Tree] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that go down to one client."""
        return tree.nbytes(self.model) + tree.nbytes(tree.nest(self.extras))


@dataclass(frozen=True)
class Update:
    """From a client to the server after its local training."""

    client: int
    model: Tree
    examples: int
    steps: int
    loss: float
    seconds: float
    extras: Mapping[str, Tree] = field(default_factory=dict)
    curve: tuple[float, ...] = ()
    """The loss on the client's own data after each step, of a client that is watched; only simulations have it."""
    members: tuple[int, ...] = ()
    """Whose updates this is the mean of, if it is one: with secure aggregation, the server has no other."""
    failure: str = ""
    """Why the client has nothing to send; then there is nothing else in it."""

    @classmethod
    def failed(cls, client: int, reason: str) -> Update:
        """In place of the update of a client that could not train."""
        return cls(client, {}, 0, 0, 0.0, 0.0, failure=reason)

    @property
    def nbytes(self) -> int:
        """Bytes that one client sends up."""
        return tree.nbytes(self.model) + tree.nbytes(tree.nest(self.extras))


def validate_update(update: Update, broadcast: Broadcast, extras_spec: Mapping[str, Tree] | None = None) -> str | None:
    """Returns why this update must not be averaged, or None if it is sound."""
    if update.failure:
        return update.failure
    if update.examples < 1:
        return f"trained on {update.examples} examples"
    if reason := _validate_tensors(update.model, broadcast.model):
        return reason
    extras = tree.nest(update.extras)
    if extras_spec is not None and (reason := _validate_tensors(extras, tree.nest(extras_spec))):
        return reason
    return validate_finite(update.model | extras)


def validate_setup(setup: Tree, spec: Tree) -> str | None:
    """Returns why a client's set-up must not count, or None if it is sound; `spec` is its layout without the rows."""
    if any(tensor.dim() == 0 for tensor in setup.values()):
        return "it holds a single number"
    if reason := _validate_tensors({name: tensor[:0] for name, tensor in setup.items()}, spec):
        return reason
    if len({len(tensor) for tensor in setup.values()}) > 1:
        return "its tensors differ in their rows"
    return validate_finite(setup)


def validate_finite(tensors: Tree) -> str | None:
    """Returns a sentence about the first tensor with NaN or infinity, if there is one."""
    for name, tensor in tensors.items():
        # A finite sum proves that all are finite in a tenth of the time; one that isn't may only be too large.
        if tensor.is_floating_point() and not (math.isfinite(tensor.sum()) or torch.isfinite(tensor).all()):
            return f"'{name}' holds NaN or infinity"
    return None


def validate_layout(got: Tree, expected: Tree) -> str | None:
    """Returns a sentence about the first name that is missing or not expected, or the first shape that differs."""
    if missing := sorted(expected.keys() - got.keys()):
        return f"'{missing[0]}' is missing"
    if unknown := sorted(got.keys() - expected.keys()):
        return f"'{printable(unknown[0])}' is not expected"
    for name, tensor in expected.items():
        if got[name].shape != tensor.shape:
            return f"'{name}' has shape {tuple(got[name].shape)}, not {tuple(tensor.shape)}"
    return None


def _validate_tensors(got: Tree, expected: Tree) -> str | None:
    if reason := validate_layout(got, expected):
        return reason
    for name, tensor in expected.items():
        if got[name].dtype != tensor.dtype:
            return f"'{name}' has dtype {got[name].dtype}, not {tensor.dtype}"
    return None

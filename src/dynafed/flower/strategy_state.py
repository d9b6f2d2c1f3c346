"""The state that a wrapped strategy keeps from round to round, in a form that is saved without pickling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy

from dynafed import tree
from dynafed.errors import UserError
from dynafed.tree import Tree

CURRENT_ARRAYS = "current_arrays"
"""The attribute in which strategies with momentum or differential privacy keep the model that the clients got."""


class StrategyState:
    """The state of a strategy, and of those that it wraps in turn.

    It consists of attributes: arrays, lists and dicts of arrays, numbers that changed since the beginning, and the
    ledger of a privacy accountant.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategies = list(_unwrap(strategy))
        self.initial_numbers = [_numbers(one) for one in self.strategies]

    def set_current_arrays(self, arrays: ArrayRecord) -> None:
        """Set the model that the clients get in the strategies that compare with it."""
        for one in self.strategies:
            if isinstance(getattr(one, CURRENT_ARRAYS, None), ArrayRecord):
                setattr(one, CURRENT_ARRAYS, arrays)

    def snapshot(self) -> list[dict[str, Any]]:
        """All attributes as they are, for `rollback` in this process."""
        return [dict(vars(one)) for one in self.strategies]

    def rollback(self, snapshot: list[dict[str, Any]]) -> None:
        """The inverse of `snapshot`."""
        for one, before in zip(self.strategies, snapshot, strict=True):
            vars(one).update(before)

    def save(self) -> tuple[Tree, list[dict[str, Any]]]:
        """Its tensors, and the rest as JSON can hold it."""
        tensors, notes = {}, []
        for depth, (one, initial) in enumerate(zip(self.strategies, self.initial_numbers, strict=True)):
            for name, value in vars(one).items():
                if name not in (CURRENT_ARRAYS, "sent_arrays") and (found := _arrays(value)):
                    kind, arrays = found
                    tensors[f"{depth}/{name}/{kind}"] = encode_order(arrays)
            accountant = getattr(one, "accountant", None)
            notes.append(
                {
                    "strategy": type(one).__name__,
                    "numbers": {name: x for name, x in _numbers(one).items() if initial.get(name) != x},
                    "accountant": accountant.state_dict() if accountant else None,
                }
            )
        return tree.nest(tensors), notes

    def load(self, tensors: Tree, notes: list[dict[str, Any]]) -> None:
        """The inverse of `save`."""
        before, now = [note["strategy"] for note in notes], [type(one).__name__ for one in self.strategies]
        if before != now:
            raise UserError(f"the checkpoint was made with {' around '.join(before)}, not {' around '.join(now)}")
        for one, note in zip(self.strategies, notes, strict=True):
            vars(one).update(note["numbers"])
            if note["accountant"]:
                accountant = getattr(one, "accountant", None)
                if accountant is None:
                    raise UserError("the checkpoint was made with a privacy accountant: give it one again")
                accountant.load_state_dict(note["accountant"])
        for depth, attributes in tree.unnest(tensors).items():
            for name, kinds in tree.unnest(attributes).items():
                for kind, arrays in tree.unnest(kinds).items():
                    setattr(self.strategies[int(depth)], name, _value(kind, decode_order(arrays)))


def encode_order(arrays: Tree) -> Tree:
    """Puts the order into the names: a file may not keep it."""
    return {f"{number:06d}.{name}": tensor for number, (name, tensor) in enumerate(arrays.items())}


def decode_order(arrays: Tree) -> Tree:
    """The inverse of `encode_order`."""
    return {name.partition(".")[2]: arrays[name] for name in sorted(arrays)}


def _unwrap(strategy: Any) -> Iterator[Strategy]:
    while isinstance(strategy, Strategy):
        yield strategy
        strategy = getattr(strategy, "strategy", None)


def _numbers(strategy: Strategy) -> dict[str, float]:
    return {name: value for name, value in vars(strategy).items() if type(value) in (int, float)}


def _arrays(value: Any) -> tuple[str, Tree] | None:
    """The kind of container and what is in it, if that is arrays and nothing else."""
    kind: str
    arrays: dict[Any, Any]
    if isinstance(value, ArrayRecord):
        kind, arrays = "record", {name: array.numpy() for name, array in value.items()}
    elif isinstance(value, dict):
        kind, arrays = "dict", value
    elif isinstance(value, list):
        kind, arrays = "list", {str(number): array for number, array in enumerate(value)}
    else:
        kind, arrays = "array", {"": value}
    plain = all(isinstance(array, np.ndarray | np.generic) and array.dtype.kind in "biuf" for array in arrays.values())
    if not (arrays and plain and all(isinstance(name, str) for name in arrays)):
        return None
    return kind, {name: torch.tensor(array) for name, array in arrays.items()}


def _value(kind: str, tensors: Tree) -> Any:
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    if kind == "record":
        return ArrayRecord({name: Array(array) for name, array in arrays.items()})
    return {"dict": arrays, "list": list(arrays.values()), "array": arrays.get("")}[kind]

"""Nobody sees what isn't theirs: what a method's halves get leads to no other data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from problems import TEST, TRAIN, tiny
from torch import Tensor

import dynafed
from dynafed import Method
from dynafed.data import Dataset, Partition, SplitDataset
from dynafed.engine.federation import Federation
from dynafed.methods import METHODS, ClientContext, ClientOutput, ServerContext, ServerOutput
from dynafed.tree import Tree


def reachable(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Everything that attributes, items and elements lead to."""
    if id(thing) in seen or isinstance(thing, str | bytes | int | float | type):
        return
    seen.add(id(thing))
    yield thing
    inside: list[Any] = []
    if isinstance(thing, dict):
        inside = list(thing.values())
    elif isinstance(thing, list | tuple | set | frozenset):
        inside = list(thing)
    elif not isinstance(thing, Tensor | np.ndarray) and not callable(getattr(thing, "__code__", None)):
        inside = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    for each in inside:
        yield from reachable(each, seen)


def rows_in(things: list[Any], x: np.ndarray) -> set[int]:
    """The rows of `x` that occur in any of the tensors or arrays."""
    index = {row.tobytes(): number for number, row in enumerate(x)}
    found = set()
    for thing in things:
        values = thing.detach().numpy() if isinstance(thing, Tensor) else thing
        if isinstance(values, np.ndarray) and values.ndim == 2 and values.shape[1] == x.shape[1]:
            found |= {index[row.tobytes()] for row in np.ascontiguousarray(values, x.dtype) if row.tobytes() in index}
    return found


class Spy(Method):
    """Keeps what its halves were given."""

    name = "test-spy"
    given: list[Any] = []  # noqa: RUF012

    def finish(self, params: Tree, client: ClientContext) -> ClientOutput:
        self.given.append(client)
        return ClientOutput()

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        self.given.append(server)
        return ServerOutput(model, state)


def test_a_server_half_has_no_way_to_any_client_s_data(tmp_path: Path) -> None:
    config = tiny(method="test-spy", server_samples=30, rounds=1, participation=1.0)
    try:
        result = dynafed.run(config, train=TRAIN, test=TEST, out=tmp_path / "r")
    finally:
        METHODS.remove("test-spy")
    *clients, server = Spy.given
    assert isinstance(server, ServerContext)
    things = list(reachable(server, set()))
    assert not any(isinstance(thing, Dataset | Partition | SplitDataset | Federation) for thing in things)
    assert rows_in(things, TRAIN[0]) == set(result.federation.data.server_rows.tolist())
    assert not rows_in(things, TEST[0])
    for context in clients:
        own = set(result.federation.data.partition[context.client].tolist())
        things = list(reachable(context, set()))
        assert rows_in(things, TRAIN[0]) == own
        assert not any(isinstance(thing, Dataset | Partition | SplitDataset | Federation) for thing in things)


def test_neither_side_of_a_federation_has_data_of_the_other() -> None:
    federation = Federation.create(tiny(server_samples=30), train=TRAIN, test=TEST)
    assert not rows_in(list(reachable(federation.client_side, set())), TRAIN[0])
    server = rows_in(list(reachable(federation.server_side, set())), TRAIN[0])
    assert server == set(federation.data.server_rows.tolist())
    assert {field.name for field in dataclasses.fields(federation.problem)}.isdisjoint({"dataset", "partition", "data"})
    assert torch.equal(federation.client(2).x, torch.from_numpy(TRAIN[0][federation.data.partition[2]]))

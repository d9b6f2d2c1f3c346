"""Who trains the clients: the protocol of a backend, and the registry of those that a config can name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from dynafed.engine.client_store import ClientStore
from dynafed.engine.federation import Federation
from dynafed.messages import Broadcast, Update
from dynafed.registry import Registry
from dynafed.tree import Tree


class Backend(Protocol):
    """Trains clients and evaluates models. Used as a context manager around all rounds of a run."""

    def __enter__(self) -> Backend:
        """Start what trains clients."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop it."""

    def setup_clients(self) -> Iterator[Tree]:
        """Yields what each client that has data sends once, before round 1."""

    def train(
        self, broadcast: Broadcast, cohort: Iterable[tuple[int, float]], load_state: Callable[[int], Tree]
    ) -> Iterator[tuple[Update, Tree]]:
        """Yields the update and the new state of each (client, share of its steps) of the cohort, in that order."""

    def evaluate(self, model: Tree) -> dict[str, Any]:
        """A model's metrics, as `engine/evaluation.py` computes them."""

    def client_store(self, folder: Path, limit: int, listing: Mapping[int, tuple[int, str]] | None) -> ClientStore:
        """Where clients' states are kept: at most `limit` bytes in memory, the rest in `folder`."""


BackendFactory = Callable[[Federation, Path], Backend]
"""Makes the backend of a run, given the federation and the run's folder."""

BACKENDS: Registry[BackendFactory] = Registry(
    "backend",
    {
        "local": "dynafed.engine.processes:ProcessBackend",
        "flower": "dynafed.flower.simulation:FlowerSimulation",
    },
    key="engine",
)
"""Backends by name."""


def setup_clients(federation: Federation) -> Iterator[Tree]:
    """What each client that has data sends once, before round 1, computed in this process."""
    method = federation.methods.sets_up
    assert method is not None
    for client in filter(federation.has_data, range(federation.problem.clients)):
        yield method.setup_client(federation.client(client))

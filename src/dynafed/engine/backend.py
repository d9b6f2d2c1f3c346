"""Who trains the clients: the protocol of a backend, and the registry of those that a config can name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
import torch.nn.functional as F

from dynafed import tree
from dynafed.engine.client_store import ClientStore
from dynafed.engine.federation import Federation
from dynafed.messages import Broadcast, Update
from dynafed.problem import BATCH
from dynafed.registry import Registry
from dynafed.stages import counted
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

    def evaluate(self, model: Tree) -> tuple[float, float]:
        """Accuracy and mean loss on the evaluation split."""

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


def evaluate(federation: Federation, model: Tree) -> tuple[float, float]:
    """Accuracy and mean loss on the evaluation split, computed in this process."""
    return summed(federation, (evaluate_slice(federation, model, *ends) for ends in evaluation_slices(federation)))


def summed(federation: Federation, results: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Accuracy and mean loss from the results of all slices."""
    told = counted("evaluation", results, len(evaluation_slices(federation)))
    correct, loss = (sum(parts) for parts in zip(*told, strict=True))
    return correct / federation.evaluation_size(), loss / federation.evaluation_size()


def evaluation_slices(federation: Federation) -> list[tuple[int, int]]:
    """The slices of the evaluation split."""
    size = federation.evaluation_size()
    return [(start, min(start + BATCH, size)) for start in range(0, size, BATCH)]


@torch.no_grad()
def evaluate_slice(federation: Federation, model: Tree, start: int, stop: int) -> tuple[int, float]:
    """How many of a slice's samples are classified correctly, and the sum of their losses."""
    problem = federation.problem
    problem.network.eval()
    x, y = federation.evaluation_data(start, stop)
    logits = problem.forward(tree.to(model, problem.device), x)
    return int((logits.argmax(1) == y).sum()), float(F.cross_entropy(logits, y, reduction="sum"))

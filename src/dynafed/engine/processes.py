"""Clients trained in processes of our own. How many there are changes the speed, never a bit of the result."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from dynafed import tree
from dynafed.engine import backend, evaluation
from dynafed.engine.client_store import ClientStore
from dynafed.engine.federation import Federation
from dynafed.engine.local import local_update
from dynafed.engine.worker import (
    TASKS_AHEAD,
    Function,
    Sent,
    SharedTrees,
    Worker,
    WorkerGone,
    required_room,
    silent,
)
from dynafed.errors import WorkerDied
from dynafed.execution import keep_freed_memory
from dynafed.messages import Broadcast, Update
from dynafed.stages import counted
from dynafed.tasks import Tally
from dynafed.tree import Tree

log = logging.getLogger("dynafed")

MAX_REPLACED = 3
"""Worker processes that are replaced in a run. A client's training is deterministic: another process gives the same."""


class ProcessBackend:
    """Trains clients and evaluates models in this process, or in several; a `Backend`.

    Each worker computes with `threads` threads, whatever their number: a sum's bits depend on how it is split.
    """

    def __init__(self, federation: Federation, folder: Path | None = None) -> None:
        self.federation = federation
        self.count = federation.execution.workers
        self.workers: list[Worker] = []
        self.replaced = 0
        self.threads_before = torch.get_num_threads()

    def __enter__(self) -> ProcessBackend:
        keep_freed_memory()
        torch.set_num_threads(self.federation.config.threads)
        if self.count > 1:
            room = _room(self.federation)
            self.common = SharedTrees(self.federation, room, slots=1)
            for _ in counted("starting workers", range(self.count)):
                self.workers.append(Worker(self.federation, self.common, room))
        log.info("%s", self.federation.execution)
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.kill()
        torch.set_num_threads(self.threads_before)

    def setup_clients(self) -> Iterator[Tree]:
        """Yields what each client that has data sends once, before round 1."""
        return backend.setup_clients(self.federation)

    def train(
        self, broadcast: Broadcast, cohort: Iterable[tuple[int, float]], load_state: Callable[[int], Tree]
    ) -> Iterator[tuple[Update, Tree]]:
        """Yields updates and states of the clients of `cohort` (client, share of its work), in that order."""
        if not self.workers:
            side = self.federation.client_side
            for client, work in cohort:
                yield local_update(side, self.federation.client(client), broadcast, load_state(client), work)
            return
        common = tree.nest({"model": broadcast.model, "extras": tree.nest(broadcast.extras)})
        tasks = ((broadcast.round, client, load_state(client), work) for client, work in cohort)
        for update, found in self._in_order(_train, common, tasks):
            parts = tree.unnest(found)
            model, extras = parts.get("model", {}), tree.unnest(parts.get("extras", {}))
            yield replace(update, model=model, extras=extras), parts.get("state", {})

    def evaluate(self, model: Tree) -> dict[str, Any]:
        """A model's metrics."""
        if not self.workers:
            return evaluation.evaluate(self.federation, model)
        parts = evaluation.evaluation_parts(self.federation)
        tallies = (found for found, _ in self._in_order(_evaluate, model, parts))
        return evaluation.metrics(self.federation, parts, tallies)

    def client_store(self, folder: Path, limit: int, listing: Mapping[int, tuple[int, str]] | None) -> ClientStore:
        """Clients' states are the run's own."""
        return ClientStore(folder, limit, listing)

    def _in_order(
        self, function: Function, common: Tree, tasks: Iterable[tuple[Any, ...]]
    ) -> Iterator[tuple[Any, Tree]]:
        """Results of `function(federation, common, *task)` in the tasks' order; only a few wait for their turn.

        Each worker has a second task in hand, so that it doesn't wait for us.
        """
        shared = self.common.write(common)
        for worker in self.workers:
            with self._replacing(worker, shared):
                worker.share(shared)
        numbered = enumerate(tasks)
        free = deque(self.workers * TASKS_AHEAD)
        done: dict[int, tuple[Any, Tree]] = {}
        due, sent, more = 0, 0, True
        while True:
            while more and free and sent < due + (1 + TASKS_AHEAD) * self.count:
                if (entry := next(numbered, None)) is None:
                    more = False
                    break
                worker = free.popleft()
                with self._replacing(worker, shared):
                    worker.give(entry[0], function, entry[1])
                sent += 1
            if due in done:
                yield done.pop(due)
                due += 1
                continue
            busy = [worker for worker in self.workers if worker.tasks]
            if not busy:
                return
            ready = self._wait(busy)
            for worker in busy:
                with self._replacing(worker, shared):
                    if not ready:
                        raise silent(self.federation.config.worker_timeout)
                    if worker.connection in ready:
                        number, result = worker.receive()
                        done[number] = result
                        free.append(worker)

    def _wait(self, busy: Iterable[Worker]) -> list[Any]:
        """The connections of the workers that have answered, or have died; empty if all are silent for too long."""
        connections = [worker.connection for worker in busy]
        patience = self.federation.config.worker_timeout
        # In short turns: time in which this process itself is stopped, by Ctrl-Z say, doesn't count.
        for _ in range(patience) if patience else itertools.count():
            if ready := wait(connections, 1.0):
                return ready
        return []

    @contextmanager
    def _replacing(self, worker: Worker, common: Sent) -> Iterator[None]:
        """Replace a worker that is found to be gone by another, which does its tasks."""
        try:
            yield
        except WorkerGone as gone:
            if self.replaced == MAX_REPLACED:
                raise WorkerDied(f"{gone}, and {MAX_REPLACED} have been replaced before") from None
            self.replaced += 1
            log.warning("%s; another one does its tasks", gone)
            with self._replacing(worker, common):
                worker.restart(common)


def _train(
    federation: Federation, common: Tree, round_num: int, client: int, state: Tree, work: float
) -> tuple[Update, Tree]:
    parts = tree.unnest(common)
    broadcast = Broadcast(round_num, parts["model"], tree.unnest(parts.get("extras", {})))
    update, kept = local_update(federation.client_side, federation.client(client), broadcast, state, work)
    found = tree.nest({"model": update.model, "extras": tree.nest(update.extras), "state": kept})
    return replace(update, model={}, extras={}), found


def _room(federation: Federation) -> int:
    """Bytes for what travels at a time: a model, and as much for whatever else is kept or sent beside it."""
    methods = federation.methods
    kept = sum(method.needs.client_memory for method in methods.clients)
    moments = 2 if federation.config.client_state == "persistent" else 0
    extras = required_room(tree.nest(methods.extras_spec(federation.problem)))
    return (2 + kept + moments) * required_room(federation.problem.initial_model()) + extras


def _evaluate(federation: Federation, model: Tree, kind: str, first: int, stop: int) -> tuple[Tally, None]:
    return evaluation.evaluate_part(federation, model, kind, first, stop), None

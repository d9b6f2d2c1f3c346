"""The processes that train clients. How many there are changes the speed, never a bit of the result."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

import torch

from dynafed import tree
from dynafed.engine.evaluate import chunks, evaluate_chunk
from dynafed.engine.local import local_update
from dynafed.engine.plan import Plan
from dynafed.engine.shelf import Shelf
from dynafed.engine.traffic import enrolments
from dynafed.errors import UserError, WorkerDied
from dynafed.messages import Broadcast, Update
from dynafed.path import keep_freed_memory
from dynafed.tree import Tree

log = logging.getLogger("dynafed")

AHEAD = 2
"""Tasks that a worker has at most: the one that it is at, and the next."""


class Workers:
    """Trains clients and evaluates models, in this process or in several; used as a context manager.

    Each worker computes with `threads` threads, whatever their number: a sum's bits depend on how it is split.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.count = plan.path.workers
        self.crew: dict[Connection, tuple[BaseProcess, Shelf]] = {}
        self.threads_before = torch.get_num_threads()

    def __enter__(self) -> Workers:
        keep_freed_memory()
        torch.set_num_threads(self.plan.config.threads)
        if self.count > 1:
            self.crew = dict(_hired(self.plan) for _ in range(self.count))
        log.info("%s", self.plan.path)
        return self

    def __exit__(self, *error: object) -> None:
        for process, _ in self.crew.values():
            process.kill()
        for connection, (process, _) in self.crew.items():
            process.join()
            connection.close()
        torch.set_num_threads(self.threads_before)

    def enrol(self) -> Iterator[Tree]:
        """What each client that has data sends once, before round 1."""
        return enrolments(self.plan)

    def train(
        self, broadcast: Broadcast, cohort: Iterable[tuple[int, float]], memory_of: Callable[[int], Tree]
    ) -> Iterator[tuple[Update, Tree]]:
        """Updates and memories of the clients of `cohort` (client, share of its work), in that order, as they come."""
        if not self.crew:
            for client, work in cohort:
                yield local_update(self.plan, broadcast, client, memory_of(client), work)
            return
        common = tree.nest({"model": broadcast.model, "extras": tree.nest(broadcast.extras)})
        tasks = ((broadcast.round, client, tree.pack(memory_of(client)), work) for client, work in cohort)
        for (update, extras, memory), model in self._ordered(_train, common, tasks):
            yield replace(update, model=model, extras=tree.unnest(tree.unpack(extras))), tree.unpack(memory)

    def evaluate(self, model: Tree) -> tuple[float, float]:
        """Accuracy and mean loss on the evaluation split."""
        slices = chunks(self.plan)
        if not self.crew:
            results: Iterable[tuple[int, float]] = (evaluate_chunk(self.plan, model, *ends) for ends in slices)
        else:
            results = (counts for counts, _ in self._ordered(_evaluate, model, slices))
        right, loss = (sum(parts) for parts in zip(*results, strict=True))
        return right / self.plan.evaluation_size(), loss / self.plan.evaluation_size()

    def _ordered(
        self, function: Callable[..., tuple[Any, Tree | None]], common: Tree, tasks: Iterable[tuple[Any, ...]]
    ) -> Iterator[tuple[Any, Tree]]:
        """Results of `function(common, *task)` in the tasks' order; only a few wait for their turn.

        Each worker has a second task in hand, so that it needn't wait for us.
        """
        blob = tree.pack(common)
        for connection in self.crew:
            self._say(connection, (None, blob))
        numbered = enumerate(tasks)
        hands = deque([*self.crew] * AHEAD)
        running: dict[Connection, deque[int]] = {connection: deque() for connection in self.crew}
        done: dict[int, tuple[Any, Tree]] = {}
        due, sent, more = 0, 0, True
        while True:
            while more and hands and sent < due + (1 + AHEAD) * self.count:
                if (entry := next(numbered, None)) is None:
                    more = False
                    break
                connection = hands.popleft()
                self._say(connection, (function, entry[1]))
                running[connection].append(entry[0])
                sent += 1
            if due in done:
                yield done.pop(due)
                due += 1
                continue
            busy = [connection for connection, numbers in running.items() if numbers]
            if not busy:
                return
            for ready in wait(busy):
                assert isinstance(ready, Connection)
                done[running[ready].popleft()] = self._hear(ready)
                hands.append(ready)

    def _say(self, connection: Connection, message: Any) -> None:
        try:
            connection.send(message)
        except OSError:
            raise self._death(connection) from None

    def _hear(self, connection: Connection) -> tuple[Any, Tree]:
        """A result and, if it has one, its model; from now on the worker may use the model's place again."""
        try:
            fine, value, place = connection.recv()
        except (EOFError, OSError):
            raise self._death(connection) from None
        if not fine:
            raise value
        return value, {} if place is None else self.crew[connection][1].take(place)

    def _death(self, connection: Connection) -> WorkerDied:
        process, _ = self.crew[connection]
        process.join(1)
        return WorkerDied(f"a worker process died (exit code {process.exitcode}); was memory short? try fewer workers")


def _hired(plan: Plan) -> tuple[Connection, tuple[BaseProcess, Shelf]]:
    """A worker process, and our end of the pipe to it. Nobody else has its end, so that its death is noticed.

    Models come back on a shelf: a pipe holds so little that the worker would have to wait until we have read them.
    """
    # Forked workers share the data without a copy and need nothing picklable from the user. Elsewhere than on Linux,
    # system libraries don't survive a fork.
    # Nor does OpenMP, unless the workers have one thread only.
    method = "fork" if sys.platform == "linux" and plan.config.threads == 1 else "spawn"
    if method == "spawn":
        try:
            pickle.dumps(plan)
        except Exception as error:
            raise UserError(
                f"the model or data can't be sent to worker processes ({error}): set workers = 1 or threads = 1"
            ) from None
    else:
        _ = plan.dataset.ready  # all workers share what is there before they are
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    shelf = Shelf(plan.initial_model(), places=AHEAD)
    process = context.Process(target=_work, args=(plan, theirs, shelf), daemon=True)
    process.start()
    theirs.close()
    return ours, (process, shelf)


_plan: Plan | None = None
"""In a worker process: what it was started with."""


def _work(plan: Plan, orders: Connection, shelf: Shelf) -> None:
    """A worker's life: take an order, send back what came of it."""
    _start(plan)
    inbox: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive, args=(orders, inbox), daemon=True).start()
    common: Tree = {}
    while True:
        function, task = inbox.get()
        if function is None:
            common = tree.unpack(task)
            continue
        try:
            value, model = function(common, *task)
            orders.send((True, value, None if model is None else shelf.put(model)))
        except Exception as error:
            orders.send((False, error, None))


def _receive(orders: Connection, inbox: SimpleQueue[Any]) -> None:
    """Take orders in at once: if we waited for the parent to listen and it for us, neither would ever go on."""
    while True:
        inbox.put(orders.recv())


def _start(plan: Plan) -> None:
    global _plan
    _plan = plan
    torch.set_num_threads(plan.config.threads)
    # Whoever stops the whole process group means the parent: it decides what is still to be done, then ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """A parent that is killed can't tell its workers to stop: they watch for its end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _train(
    common: Tree, round: int, client: int, memory: bytes, work: float
) -> tuple[tuple[Update, bytes, bytes], Tree]:
    assert _plan is not None
    parts = tree.unnest(common)
    broadcast = Broadcast(round, parts["model"], tree.unnest(parts.get("extras", {})))
    update, kept = local_update(_plan, broadcast, client, tree.unpack(memory), work)
    bare = replace(update, model={}, extras={})
    return (bare, tree.pack(tree.nest(update.extras)), tree.pack(kept)), update.model


def _evaluate(model: Tree, start: int, stop: int) -> tuple[tuple[int, float], None]:
    assert _plan is not None
    return evaluate_chunk(_plan, model, start, stop), None

"""Clients trained in processes of our own. How many there are changes the speed, never a bit of the result."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from dynafed import tree
from dynafed.engine import backend, evaluation
from dynafed.engine.client_store import ClientStore
from dynafed.engine.federation import Federation
from dynafed.engine.local import local_update
from dynafed.engine.stopping import SIGNALS
from dynafed.errors import UserError, WorkerDied
from dynafed.execution import keep_freed_memory
from dynafed.messages import Broadcast, Update
from dynafed.stages import counted
from dynafed.tasks import Tally
from dynafed.tree import Tree

log = logging.getLogger("dynafed")

TASKS_AHEAD = 2
"""Tasks that a worker has at most: the one that it is at, and the next."""

ALIGNMENT = 64
"""Every tensor of a shared buffer begins at a multiple of so many bytes."""


class ProcessBackend:
    """Trains clients and evaluates models in this process, or in several; a `Backend`.

    Each worker computes with `threads` threads, whatever their number: a sum's bits depend on how it is split.
    """

    def __init__(self, federation: Federation, folder: Path | None = None) -> None:
        self.federation = federation
        self.count = federation.execution.workers
        self.workers: dict[Connection, tuple[BaseProcess, SharedModelBuffer]] = {}
        self.threads_before = torch.get_num_threads()

    def __enter__(self) -> ProcessBackend:
        keep_freed_memory()
        torch.set_num_threads(self.federation.config.threads)
        if self.count > 1:
            self.workers = dict(_start_worker(self.federation) for _ in counted("starting workers", range(self.count)))
        log.info("%s", self.federation.execution)
        return self

    def __exit__(self, *error: object) -> None:
        for process, _ in self.workers.values():
            process.kill()
        for connection, (process, _) in self.workers.items():
            process.join()
            connection.close()
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
        tasks = ((broadcast.round, client, tree.pack(load_state(client)), work) for client, work in cohort)
        for (update, extras, state), model in self._in_order(_train, common, tasks):
            yield replace(update, model=model, extras=tree.unnest(tree.unpack(extras))), tree.unpack(state)

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
        self, function: Callable[..., tuple[Any, Tree | None]], common: Tree, tasks: Iterable[tuple[Any, ...]]
    ) -> Iterator[tuple[Any, Tree]]:
        """Results of `function(common, *task)` in the tasks' order; only a few wait for their turn.

        Each worker has a second task in hand, so that it doesn't wait for us.
        """
        blob = tree.pack(common)
        for connection in self.workers:
            self._send(connection, (None, blob))
        numbered = enumerate(tasks)
        free = deque([*self.workers] * TASKS_AHEAD)
        running: dict[Connection, deque[int]] = {connection: deque() for connection in self.workers}
        done: dict[int, tuple[Any, Tree]] = {}
        due, sent, more = 0, 0, True
        while True:
            while more and free and sent < due + (1 + TASKS_AHEAD) * self.count:
                if (entry := next(numbered, None)) is None:
                    more = False
                    break
                connection = free.popleft()
                self._send(connection, (function, entry[1]))
                running[connection].append(entry[0])
                sent += 1
            if due in done:
                yield done.pop(due)
                due += 1
                continue
            busy = [connection for connection, numbers in running.items() if numbers]
            if not busy:
                return
            patience = self.federation.config.worker_timeout
            answered = wait(busy, patience or None)
            if not answered:
                raise WorkerDied(f"no worker process answered within {patience} seconds (worker_timeout)")
            for ready in answered:
                assert isinstance(ready, Connection)
                done[running[ready].popleft()] = self._receive(ready)
                free.append(ready)

    def _send(self, connection: Connection, message: Any) -> None:
        try:
            connection.send(message)
        except OSError:
            raise self._death(connection) from None

    def _receive(self, connection: Connection) -> tuple[Any, Tree]:
        """A result and, if it has one, its model; from now on the worker may use the model's slot again."""
        try:
            fine, value, model = connection.recv()
        except (EOFError, OSError):
            raise self._death(connection) from None
        if not fine:
            error, remote = value
            error.add_note(f"in a worker process:\n{remote}")
            raise error
        if isinstance(model, bytes):
            return value, tree.unpack(model)
        return value, {} if model is None else self.workers[connection][1].read(model)

    def _death(self, connection: Connection) -> WorkerDied:
        process, _ = self.workers[connection]
        process.join(1)
        return WorkerDied(f"a worker process died (exit code {process.exitcode}); was memory short? try fewer workers")


class SharedModelBuffer:
    """Memory that two processes share, with slots for models of one layout.

    The slots are filled in turn; the writer must know that the next one has been read.
    """

    def __init__(self, layout: Tree, slots: int) -> None:
        spans = {name: -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for name, tensor in layout.items()}
        self.memory = torch.empty(slots, sum(spans.values()), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self.slots: list[Tree] = []
        for memory in self.memory:
            parts = zip(layout.items(), memory.split(list(spans.values())), strict=True)
            self.slots.append(
                {name: part[: like.nbytes].view(like.dtype).view(like.shape) for (name, like), part in parts}
            )
        self.next = 0

    def holds(self, model: Tree) -> bool:
        """Whether a model has the buffer's layout; one that was transformed may not."""
        layout = self.slots[0]
        return model.keys() == layout.keys() and all(
            model[name].shape == like.shape and model[name].dtype == like.dtype for name, like in layout.items()
        )

    def write(self, model: Tree) -> int:
        """Copy a model to the next slot; returns which one that is."""
        slot, self.next = self.next, (self.next + 1) % len(self.slots)
        for name, tensor in self.slots[slot].items():
            tensor.copy_(model[name])
        return slot

    def read(self, slot: int) -> Tree:
        """A copy of the model in a slot."""
        return tree.clone_contiguous(self.slots[slot])


def _start_worker(federation: Federation) -> tuple[Connection, tuple[BaseProcess, SharedModelBuffer]]:
    """A worker process, and our end of the pipe to it. Nobody else has its end, so that its death is noticed.

    Models come back in shared memory: a pipe holds so little that the worker would have to wait until we have read.
    """
    # Forked workers share the data without a copy and need nothing picklable from the user. Elsewhere than on Linux,
    # system libraries don't survive a fork.
    # Nor does OpenMP, unless the workers have one thread only.
    method = "fork" if sys.platform == "linux" and federation.config.threads == 1 else "spawn"
    if method == "spawn":
        try:
            pickle.dumps(federation)
        except Exception as error:
            raise UserError(
                f"the model or data can't be sent to worker processes ({error}): set workers = 1 or threads = 1"
            ) from None
    else:
        federation.data.prepare()
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    buffer = SharedModelBuffer(federation.problem.initial_model(), slots=TASKS_AHEAD)
    process = context.Process(target=_work, args=(federation, theirs, buffer), daemon=True)
    with _interrupts_blocked() if method == "spawn" else nullcontext():
        process.start()
    theirs.close()
    return ours, (process, buffer)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process that is spawned here never sees Ctrl-C: while it still imports, it would die with a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would unblock them when it starts
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


_federation: Federation | None = None
"""In a worker process: what it was started with."""


def _work(federation: Federation, tasks: Connection, buffer: SharedModelBuffer) -> None:
    """A worker's loop: take a task, send back its result."""
    _init_worker(federation)
    inbox: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive_tasks, args=(tasks, inbox), daemon=True).start()
    common: Tree = {}
    while True:
        function, task = inbox.get()
        if function is None:
            common = tree.unpack(task)
            continue
        try:
            value, model = function(common, *task)
            sent: int | bytes | None = None
            if model is not None:
                sent = buffer.write(model) if buffer.holds(model) else tree.pack(model)
            tasks.send((True, value, sent))
        except Exception as error:
            remote = "".join(traceback.format_exception(error))
            try:
                tasks.send((False, (error, remote), None))
            except Exception:  # an error that can't be pickled
                tasks.send((False, (RuntimeError(f"{type(error).__name__}: {error}"), remote), None))


def _receive_tasks(tasks: Connection, inbox: SimpleQueue[Any]) -> None:
    """Take tasks in at once: if we waited for the parent to listen and it for us, neither would ever go on."""
    while True:
        inbox.put(tasks.recv())


def _init_worker(federation: Federation) -> None:
    global _federation
    _federation = federation
    torch.set_num_threads(federation.config.threads)
    # Whoever stops the whole process group means the parent: it decides what is still to be done, then ends us.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """A parent that is killed can't tell its workers to stop: they watch for its end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _train(
    common: Tree, round_num: int, client: int, state: bytes, work: float
) -> tuple[tuple[Update, bytes, bytes], Tree]:
    assert _federation is not None
    parts = tree.unnest(common)
    broadcast = Broadcast(round_num, parts["model"], tree.unnest(parts.get("extras", {})))
    view = _federation.client(client)
    update, kept = local_update(_federation.client_side, view, broadcast, tree.unpack(state), work)
    bare = replace(update, model={}, extras={})
    return (bare, tree.pack(tree.nest(update.extras)), tree.pack(kept)), update.model


def _evaluate(model: Tree, kind: str, first: int, stop: int) -> tuple[Tally, None]:
    assert _federation is not None
    return evaluation.evaluate_part(_federation, model, kind, first, stop), None

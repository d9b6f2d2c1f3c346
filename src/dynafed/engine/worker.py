"""A worker process: the server's handle on it, and the loop that it runs."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

import torch

from dynafed import tree
from dynafed.engine.federation import Federation
from dynafed.engine.stopping import SIGNALS
from dynafed.errors import UserError
from dynafed.tree import Tree

TASKS_AHEAD = 2
"""Tasks that a worker has at most: the one that it is at, and the next."""

ALIGNMENT = 64
"""Every tensor of a shared buffer begins at a multiple of so many bytes."""

Function = Callable[..., tuple[Any, Tree | None]]
"""What a task calls, with the federation, what all tasks have in common, and the task's own values: its result, and a
model if it has one."""


class WorkerGone(Exception):
    """A worker process is dead, or doesn't answer: it must be started again."""


class Worker:
    """A process that does tasks, one after the other; `start` gives it those again that it hasn't answered.

    Models come back in shared memory: a pipe holds so little that the worker would have to wait until we have read.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.tasks: deque[tuple[int, Function, tuple[Any, ...]]] = deque()
        """Number, function and values of each task that isn't answered, oldest first."""
        self.buffer = SharedModelBuffer(federation.problem.initial_model(), slots=TASKS_AHEAD)
        self.process, self.connection = _start_process(federation, self.buffer)

    def restart(self, common: bytes) -> None:
        """Start another process in this one's place, with the same tasks."""
        self.kill()
        self.process, self.connection = _start_process(self.federation, self.buffer)
        self.share(common)
        for _, function, values in self.tasks:
            self._send((function, values))

    def kill(self) -> None:
        """End the process, also if it is stopped."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def share(self, common: bytes) -> None:
        """Give it what the next tasks have in common, a packed tree."""
        self._send((None, common))

    def give(self, number: int, function: Function, values: tuple[Any, ...]) -> None:
        """Give it one more task."""
        self.tasks.append((number, function, values))
        self._send((function, values))

    def receive(self) -> tuple[int, tuple[Any, Tree]]:
        """The number of its oldest task, the task's result and, if it has one, its model; call it when one is there.

        From then on the worker may use the model's slot again.
        """
        try:
            fine, value, model = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone(error) from None
        number, _, _ = self.tasks.popleft()
        if not fine:
            failure, remote = value
            failure.add_note(f"in a worker process:\n{remote}")
            raise failure
        if isinstance(model, bytes):
            return number, (value, tree.unpack(model))
        return number, (value, {} if model is None else self.buffer.read(model))

    def _send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise self._gone(error) from None

    def _gone(self, error: Exception) -> WorkerGone:
        if isinstance(error, BlockingIOError):
            return silent(self.federation.config.worker_timeout)
        self.process.join(1)
        code = self.process.exitcode
        return WorkerGone(f"a worker process died (exit code {code}; was memory short? try fewer workers)")


def silent(seconds: int) -> WorkerGone:
    """A worker process is there, and doesn't answer."""
    return WorkerGone(f"a worker process didn't answer within {seconds} seconds (worker_timeout)")


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


def _start_process(federation: Federation, buffer: SharedModelBuffer) -> tuple[BaseProcess, Connection]:
    """A process, and our end of the pipe to it. Nobody else has its end, so that its death is noticed."""
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
    _limit_waiting(ours, federation.config.worker_timeout)
    process = context.Process(target=_work, args=(federation, theirs, buffer), daemon=True)
    with _interrupts_blocked() if method == "spawn" else nullcontext():
        process.start()
    theirs.close()
    return process, ours


def _limit_waiting(connection: Connection, seconds: int) -> None:
    """Let a message that makes no progress for so long raise BlockingIOError, instead of waiting for good.

    A stopped process takes nothing from a full pipe, and doesn't end a message that it has begun.
    """
    if seconds and sys.platform != "win32":  # there, a pipe isn't a socket
        limit = struct.pack("ll", min(seconds, 2**31 - 1), 0)
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.setblocking(True)  # whatever socket.setdefaulttimeout says
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


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


def _work(federation: Federation, tasks: Connection, buffer: SharedModelBuffer) -> None:
    """A worker's loop: take a task, send back its result."""
    _init_process(federation)
    inbox: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive_tasks, args=(tasks, inbox), daemon=True).start()
    common: Tree = {}
    while True:
        function, task = inbox.get()
        if function is None:
            common = tree.unpack(task)
            continue
        try:
            value, model = function(federation, common, *task)
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


def _init_process(federation: Federation) -> None:
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

"""A worker process: the server's handle on it, and the loop that it runs."""

from __future__ import annotations

import gc
import mmap
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
from typing import Any, NamedTuple

import torch

from dynafed import tree
from dynafed.engine.federation import Federation
from dynafed.engine.stopping import SIGNALS
from dynafed.errors import UserError
from dynafed.tree import Tree

TASKS_AHEAD = 2
"""Tasks that a worker has at most: the one that it is at, and the next."""

ALIGNMENT = 64
"""Every tensor in shared memory begins at a multiple of so many bytes."""

Function = Callable[..., tuple[Any, Tree | None]]
"""What a task calls, with the federation, what all tasks have in common, and the task's own values, some of which may
be trees: its result, and a tree if it has one. Its own trees are gone when it has returned."""


class WorkerGone(Exception):
    """A worker process is dead, or doesn't answer: it must be started again."""


class Worker:
    """A process that does tasks, one after the other; `restart` gives those again that it hasn't answered.

    Trees travel in shared memory: a pipe holds so little that both sides would have to wait for each other.
    """

    def __init__(self, federation: Federation, common: SharedTrees, room: int) -> None:
        self.federation = federation
        self.tasks: deque[tuple[int, Function, tuple[Any, ...]]] = deque()
        """Number, function and values of each task that isn't answered, oldest first."""
        self.inbox, self.outbox = (SharedTrees(federation, room, slots=TASKS_AHEAD) for _ in range(2))
        self.memory = common, self.inbox, self.outbox
        self.process, self.connection = _start_process(federation, self.memory)

    def restart(self, common: Sent) -> None:
        """Start another process in this one's place, with the same tasks."""
        self.kill()
        self.process, self.connection = _start_process(self.federation, self.memory)
        self.share(common)
        for _, function, values in self.tasks:
            self._send_task(function, values)

    def kill(self) -> None:
        """End the process, also if it is stopped."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def share(self, common: Sent) -> None:
        """Give it what the next tasks have in common."""
        self._send((None, common))

    def give(self, number: int, function: Function, values: tuple[Any, ...]) -> None:
        """Give it one more task."""
        self.tasks.append((number, function, values))
        self._send_task(function, values)

    def receive(self) -> tuple[int, tuple[Any, Tree]]:
        """The number of its oldest task, the task's result and its tree; call it when one is there.

        From then on the worker may use the tree's slot again, and we those of the task's own.
        """
        try:
            fine, value, sent = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone(error) from None
        number, _, _ = self.tasks.popleft()
        if not fine:
            failure, remote = value
            failure.add_note(f"in a worker process:\n{remote}")
            raise failure
        return number, (value, {} if sent is None else tree.clone_contiguous(self.outbox.read(sent)))

    def _send_task(self, function: Function, values: tuple[Any, ...]) -> None:
        self._send((function, [self.inbox.write(value) if isinstance(value, dict) else value for value in values]))

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


class Sent(NamedTuple):
    """Where a tree is to be found."""

    slot: int = 0
    layout: tuple[tuple[str, torch.dtype, torch.Size], ...] = ()
    """What lies in the slot, one behind the other."""
    packed: bytes = b""
    """The tree itself, if there was no room for it."""


class SharedTrees:
    """Memory that processes share, with slots of `room` bytes for a tree each.

    The slots are filled in turn; the writer must know that the next one has been read.
    """

    def __init__(self, federation: Federation, room: int, slots: int) -> None:
        size = slots * max(room, ALIGNMENT)
        # What is only forked needs no name in a file system, which may be small, and no memory before it is used.
        if start_method(federation) == "fork":
            memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        else:
            memory = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self.memory = memory.view(slots, -1)
        self.next = 0

    def write(self, content: Tree) -> Sent:
        """Copy a tree to the next slot, if it has room for it."""
        if required_room(content) > self.memory.shape[1]:
            return Sent(packed=tree.pack(content))
        slot, self.next = self.next, (self.next + 1) % len(self.memory)
        sent = Sent(slot, tuple((name, tensor.dtype, tensor.shape) for name, tensor in content.items()))
        for place, tensor in zip(self.read(sent).values(), content.values(), strict=True):
            place.copy_(tensor)
        return sent

    def read(self, sent: Sent) -> Tree:
        """The tree in a slot, not copied; or the one that was sent without."""
        if sent.packed:
            return tree.unpack(sent.packed)
        found, memory, start = {}, self.memory[sent.slot], 0
        for name, dtype, shape in sent.layout:
            size = shape.numel() * dtype.itemsize
            found[name] = memory[start : start + size].view(dtype).view(shape)
            start += _span(size)
        return found


def required_room(content: Tree) -> int:
    """The bytes that a tree takes in a slot."""
    return sum(_span(tensor.nbytes) for tensor in content.values())


def _span(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def start_method(federation: Federation) -> str:
    """How workers are started.

    Forked ones share the data without a copy and need nothing picklable from the user. Elsewhere than on Linux, system
    libraries don't survive a fork. Nor does OpenMP, unless the workers have one thread only.
    """
    return "fork" if sys.platform == "linux" and federation.config.threads == 1 else "spawn"


def _start_process(federation: Federation, memory: tuple[SharedTrees, ...]) -> tuple[BaseProcess, Connection]:
    """A process, and our end of the pipe to it. Nobody else has its end, so that its death is noticed."""
    method = start_method(federation)
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
    process = context.Process(target=_work, args=(federation, theirs, *memory), daemon=True)
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


def _work(
    federation: Federation, tasks: Connection, shared: SharedTrees, given: SharedTrees, results: SharedTrees
) -> None:
    """A worker's loop: take a task, send back its result."""
    _init_process(federation)
    inbox: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive_tasks, args=(tasks, inbox), daemon=True).start()
    common: Tree = {}
    while True:
        function, task = inbox.get()
        if function is None:
            common = tree.clone_contiguous(shared.read(task))
            continue
        try:
            values = (given.read(value) if isinstance(value, Sent) else value for value in task)
            value, found = function(federation, common, *values)
            tasks.send((True, value, None if found is None else results.write(found)))
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
    # The collector would write to every object that we share with the parent, and so copy it.
    gc.freeze()
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

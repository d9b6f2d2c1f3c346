"""Flower's nodes in place of worker processes: the rest of the engine doesn't know the difference."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, TypeVar

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from dynafed.engine.plan import Plan
from dynafed.engine.workers import Workers
from dynafed.errors import UserError, WorkerDied
from dynafed.flower import wire
from dynafed.flower.settings import FlowerSettings
from dynafed.messages import Broadcast, Update
from dynafed.tree import Tree

log = logging.getLogger("dynafed")

PATIENCE = 3
"""A run ends when no client could train in so many attempts, one after the other."""

LONGEST = 300
"""Characters of what a client says about its failure."""

Read = TypeVar("Read")


class Fleet(Workers):
    """Trains clients on Flower's nodes, and evaluates in this process.

    A node says with its `partition-id` and `num-partitions` which clients are its own: client c is served by the node
    whose partition is c modulo the number of partitions. With one partition for each client, that is one node a client.
    """

    forgiving: ClassVar[bool] = True
    """Whether a round goes on without a client that fails."""

    def __init__(self, plan: Plan, settings: FlowerSettings, grid: Grid | None = None) -> None:
        super().__init__(plan)
        self.count = 1  # no processes of our own
        self.settings = settings
        self._grid = grid
        self.partitions = 0
        """How many there are; 0 before the nodes have been asked."""
        self.asked: dict[int, str] = {}
        """Node -> the message that asks who it is, as long as there is no answer."""
        self.introduced: dict[int, tuple[int, int]] = {}
        """Node -> its partition, of how many."""
        self.strangers: dict[int, str] = {}
        """Node -> why it can't take part."""
        self.failed_attempts = 0

    @property
    def grid(self) -> Grid:
        """The way to the nodes."""
        assert self._grid is not None
        return self._grid

    def enrol(self) -> Iterator[Tree]:
        """What each client that has data sends once, before round 1; nothing in place of one that can't."""
        clients = [int(client) for client in np.flatnonzero(self.plan.partition.sizes)]
        failures = []
        for client, reply in self._exchanged("query.enrol", 0, {client: wire.whose(client) for client in clients}):
            sent = _read(reply, wire.read_enrolment)
            if isinstance(sent, str):
                failures.append(f"client {client}: {sent}")
                log.warning("before round 1, %s", failures[-1])
            if len(failures) == len(clients):
                raise WorkerDied(f"all clients failed; the last one is {failures[-1]}")
            yield {} if isinstance(sent, str) else sent

    def train(
        self, broadcast: Broadcast, cohort: Iterable[tuple[int, float]], memory_of: Callable[[int], Tree]
    ) -> Iterator[tuple[Update, Tree]]:
        """Updates of the clients of `cohort` and receipts of their memories, in that order, as they come."""
        parcel, round = wire.pack(broadcast), broadcast.round
        orders = {client: wire.order(parcel, round, client, work, memory_of(client)) for client, work in cohort}
        failures = []
        for client, reply in self._exchanged("train", round, orders):
            result = _read(reply, partial(wire.read_answer, client=client))
            if isinstance(result, str):
                failures.append(f"client {client}: {result}")
                if not self.forgiving:
                    raise WorkerDied(f"round {round}, {failures[-1]}")
                log.warning("round %d, %s", round, failures[-1])
                result = Update.failed(client, result), {} if isinstance(reply, str) else wire.loss(reply)
            yield result
        self.failed_attempts = self.failed_attempts + 1 if orders and len(failures) == len(orders) else 0
        if self.failed_attempts == PATIENCE:
            raise WorkerDied(f"all clients failed, {PATIENCE} times in a row; the last one is {failures[-1]}")

    def _exchanged(
        self, kind: str, round: int, orders: Mapping[int, RecordDict]
    ) -> Iterator[tuple[int, RecordDict | str]]:
        """Each client's reply, in the order of `orders`; where there is none, a sentence that says why."""
        self._gather(orders)
        serving, messages = self._serving(), dict[int, str | None]()
        for client, content in orders.items():
            if (node := serving.get(client % self.partitions)) is not None:
                messages[client] = self._send(node, kind, content, self.settings.timeout, str(round))
        deadline = time.monotonic() + self.settings.timeout
        for client in orders:
            # The replies wait where they are until it is their turn, so only one of them is held here.
            if (message := messages.get(client)) is None:
                yield client, "no node that serves it is connected"
            elif (reply := self._awaited(message, deadline)) is None:
                yield client, f"no answer within {self.settings.timeout:g} seconds"
            else:
                yield client, reply

    def _gather(self, clients: Collection[int]) -> None:
        """Before the first message, wait for all the nodes; later on, only if none is there for any of `clients`."""
        first = not self.partitions
        for _ in _moments(time.monotonic() + self.settings.wait):
            self._meet()
            if first and self.introduced:
                self.partitions = Counter(partitions for _, partitions in self.introduced.values()).most_common(1)[0][0]
            serving = self._serving()
            if first and len(serving) >= self._wanted():
                return
            if not first and (not clients or any(client % self.partitions in serving for client in clients)):
                return
        reasons = "".join(f"; node {node}: {reason}" for node, reason in sorted(self.strangers.items()))
        here = f"{len(serving)} of {self._wanted()} nodes are here after {self.settings.wait:g} seconds"
        if first:
            raise UserError(f"{here}: start the others, or set dynafed-min-nodes or dynafed-wait{reasons}")
        raise WorkerDied(f"{here}, and none that serves a client of this round{reasons}")

    def _wanted(self) -> int:
        return self.settings.min_nodes or min(self.partitions, self.plan.config.clients) or 1

    def _serving(self) -> dict[int, int]:
        """Partition -> node; of two nodes with the same partition, the one that came last."""
        told = self.introduced.items()
        return {partition: node for node, (partition, partitions) in told if partitions == self.partitions}

    def _meet(self) -> None:
        """Ask the nodes that are new who they are, take what has been answered, forget those that left."""
        with _connected():
            present = set(self.grid.get_node_ids())
        for known in (self.asked, self.introduced, self.strangers):
            for node in known.keys() - present:
                del known[node]
        for node in sorted(present - {*self.asked, *self.introduced, *self.strangers}):
            if message := self._send(node, "query", RecordDict(), self.settings.wait, "0"):
                self.asked[node] = message
        for node, message in list(self.asked.items()):
            if (reply := self._reply(message)) is None:
                continue
            del self.asked[node]
            told = _read(reply, wire.read_introduction)
            if not isinstance(told, str) and told[2] != self.plan.fingerprint:
                told = "it has other data, another split or another network than the server"
            if isinstance(told, str):
                self.strangers[node] = told
                log.warning("node %d can't take part: %s", node, told)
            else:
                self.introduced[node] = told[:2]

    def _send(self, node: int, kind: str, content: RecordDict, seconds: float, group: str) -> str | None:
        """The id of the message, or None if the node is not there any more."""
        message = Message(content, dst_node_id=node, message_type=kind, ttl=seconds, group_id=group)
        with _connected():
            return next(iter(self.grid.push_messages([message])), None)

    def _reply(self, message: str) -> RecordDict | str | None:
        """What was answered, or why there will be no answer, or None as long as there is none."""
        with _connected():
            replies = list(self.grid.pull_messages([message]))
        for reply in replies:
            return (reply.error.reason or "").strip() or "it failed" if reply.has_error() else reply.content
        return None

    def _awaited(self, message: str, deadline: float) -> RecordDict | str | None:
        for _ in _moments(deadline):
            if (reply := self._reply(message)) is not None:
                return reply
        return None


@contextmanager
def _connected() -> Iterator[None]:
    """Whatever goes wrong between server app and SuperLink: what was done so far is saved."""
    try:
        yield
    except WorkerDied:
        raise
    except Exception as error:
        raise WorkerDied(f"the SuperLink can't be reached: {type(error).__name__}: {error}") from error


def _moments(deadline: float) -> Iterator[None]:
    """To look for something now, then again and again with growing pauses, until it is too late."""
    pause = 0.005
    yield
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(0.5, 1.5 * pause)
        yield


def _read(reply: RecordDict | str, reader: Callable[[RecordDict], Read]) -> Read | str:
    """What a reply says, or a sentence if it says nothing: whatever a client sends, the server goes on."""
    if isinstance(reply, str):
        return reply.splitlines()[0][:LONGEST]
    try:
        reason = wire.refused(reply)
        return reader(reply) if reason is None else reason[:LONGEST]
    except Exception as error:
        return f"its answer can't be read: {type(error).__name__}: {error}"[:LONGEST]

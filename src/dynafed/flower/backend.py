"""Trains clients on Flower's nodes in place of worker processes."""

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
from dynafed.flower.app_config import AppConfig
from dynafed.messages import Broadcast, Update
from dynafed.tree import Tree

log = logging.getLogger("dynafed")

MAX_FAILED_ATTEMPTS = 3
"""A run ends when all clients failed in so many attempts in a row."""

MAX_REASON_LENGTH = 300
"""Characters of a client's failure reason that are kept."""

T = TypeVar("T")


class FlowerBackend(Workers):
    """Trains clients on Flower's nodes, and evaluates in this process.

    A node says with its `partition-id` and `num-partitions` which clients are its own: client c is served by the node
    whose partition is c modulo the number of partitions. With one partition for each client, that is one node a client.
    """

    tolerate_failures: ClassVar[bool] = True
    """Whether a round goes on without a client that fails."""

    def __init__(self, plan: Plan, app_config: AppConfig, grid: Grid | None = None) -> None:
        super().__init__(plan)
        self.count = 1  # no processes of our own
        self.app_config = app_config
        self._grid = grid
        self.num_partitions = 0
        """0 before the nodes have been queried."""
        self.pending_queries: dict[int, str] = {}
        """Node -> id of the node-info query, as long as there is no reply."""
        self.node_info: dict[int, tuple[int, int]] = {}
        """Node -> its partition, of how many."""
        self.rejected_nodes: dict[int, str] = {}
        """Node -> why it can't take part."""
        self.failed_attempts = 0

    @property
    def grid(self) -> Grid:
        """The connection to the nodes."""
        assert self._grid is not None
        return self._grid

    def enrol(self) -> Iterator[Tree]:
        """What each client that has data sends once, before round 1; an empty tree for one that fails."""
        clients = [int(client) for client in np.flatnonzero(self.plan.partition.sizes)]
        requests = {client: wire.setup_request(client) for client in clients}
        failures = []
        for client, reply in self._exchange("query.setup", 0, requests):
            tensors = _read_reply(reply, wire.read_setup_reply)
            if isinstance(tensors, str):
                failures.append(f"client {client}: {tensors}")
                log.warning("before round 1, %s", failures[-1])
            if len(failures) == len(clients):
                raise WorkerDied(f"all clients failed; the last one is {failures[-1]}")
            yield {} if isinstance(tensors, str) else tensors

    def train(
        self, broadcast: Broadcast, cohort: Iterable[tuple[int, float]], memory_of: Callable[[int], Tree]
    ) -> Iterator[tuple[Update, Tree]]:
        """Updates of the clients of `cohort` and receipts of their states, in that order, as they arrive."""
        records, round_num = wire.pack_broadcast(broadcast), broadcast.round
        requests = {
            client: wire.train_request(records, round_num, client, work, memory_of(client)) for client, work in cohort
        }
        failures = []
        for client, reply in self._exchange("train", round_num, requests):
            result = _read_reply(reply, partial(wire.read_train_reply, client=client))
            if isinstance(result, str):
                failures.append(f"client {client}: {result}")
                if not self.tolerate_failures:
                    raise WorkerDied(f"round {round_num}, {failures[-1]}")
                log.warning("round %d, %s", round_num, failures[-1])
                result = Update.failed(client, result), {} if isinstance(reply, str) else wire.failure_receipt(reply)
            yield result
        self.failed_attempts = self.failed_attempts + 1 if requests and len(failures) == len(requests) else 0
        if self.failed_attempts == MAX_FAILED_ATTEMPTS:
            raise WorkerDied(
                f"all clients failed, {MAX_FAILED_ATTEMPTS} times in a row; the last one is {failures[-1]}"
            )

    def _exchange(
        self, message_type: str, round_num: int, requests: Mapping[int, RecordDict]
    ) -> Iterator[tuple[int, RecordDict | str]]:
        """Each client's reply, in the order of `requests`; where there is none, the reason."""
        self._wait_for_nodes(requests)
        node_of, message_ids = self._node_of_partition(), dict[int, str | None]()
        for client, content in requests.items():
            if (node := node_of.get(client % self.num_partitions)) is not None:
                message_ids[client] = self._send(node, message_type, content, self.app_config.timeout, str(round_num))
        deadline = time.monotonic() + self.app_config.timeout
        for client in requests:
            # Replies stay at the SuperLink until it is their turn, so only one of them is held here.
            if (message_id := message_ids.get(client)) is None:
                yield client, "no node that serves it is connected"
            elif (reply := self._wait_for_reply(message_id, deadline)) is None:
                yield client, f"no answer within {self.app_config.timeout:g} seconds"
            else:
                yield client, reply

    def _wait_for_nodes(self, clients: Collection[int]) -> None:
        """Before the first message, wait for all the nodes; later on, only if none is there for any of `clients`."""
        first = not self.num_partitions
        for _ in _poll_until(time.monotonic() + self.app_config.wait):
            self._update_nodes()
            if first and self.node_info:
                counts = Counter(partitions for _, partitions in self.node_info.values())
                self.num_partitions = counts.most_common(1)[0][0]
            node_of = self._node_of_partition()
            if first and len(node_of) >= self._min_nodes():
                return
            if not first and (not clients or any(client % self.num_partitions in node_of for client in clients)):
                return
        reasons = "".join(f"; node {node}: {reason}" for node, reason in sorted(self.rejected_nodes.items()))
        here = f"{len(node_of)} of {self._min_nodes()} nodes are here after {self.app_config.wait:g} seconds"
        if first:
            raise UserError(f"{here}: start the others, or set dynafed-min-nodes or dynafed-wait{reasons}")
        raise WorkerDied(f"{here}, and none that serves a client of this round{reasons}")

    def _min_nodes(self) -> int:
        return self.app_config.min_nodes or min(self.num_partitions, self.plan.config.clients) or 1

    def _node_of_partition(self) -> dict[int, int]:
        """Partition -> node; of two nodes with the same partition, the one that came last."""
        known = self.node_info.items()
        return {partition: node for node, (partition, partitions) in known if partitions == self.num_partitions}

    def _update_nodes(self) -> None:
        """Query the nodes that are new, read the replies that are there, drop the nodes that left."""
        with _connection_errors():
            present = set(self.grid.get_node_ids())
        for known in (self.pending_queries, self.node_info, self.rejected_nodes):
            for node in known.keys() - present:
                del known[node]
        for node in sorted(present - {*self.pending_queries, *self.node_info, *self.rejected_nodes}):
            if message_id := self._send(node, "query", RecordDict(), self.app_config.wait, "0"):
                self.pending_queries[node] = message_id
        for node, message_id in list(self.pending_queries.items()):
            if (reply := self._pull_reply(message_id)) is None:
                continue
            del self.pending_queries[node]
            info = _read_reply(reply, wire.read_node_info)
            if not isinstance(info, str) and info[2] != self.plan.fingerprint:
                info = "it has other data, another split or another network than the server"
            if isinstance(info, str):
                self.rejected_nodes[node] = info
                log.warning("node %d can't take part: %s", node, info)
            else:
                self.node_info[node] = info[:2]

    def _send(self, node: int, message_type: str, content: RecordDict, seconds: float, group_id: str) -> str | None:
        """The id of the message, or None if the node is not there any more."""
        message = Message(content, dst_node_id=node, message_type=message_type, ttl=seconds, group_id=group_id)
        with _connection_errors():
            return next(iter(self.grid.push_messages([message])), None)

    def _pull_reply(self, message_id: str) -> RecordDict | str | None:
        """The content of the reply, or the reason why there is none, or None as long as it hasn't arrived."""
        with _connection_errors():
            replies = list(self.grid.pull_messages([message_id]))
        for reply in replies:
            return (reply.error.reason or "").strip() or "it failed" if reply.has_error() else reply.content
        return None

    def _wait_for_reply(self, message_id: str, deadline: float) -> RecordDict | str | None:
        for _ in _poll_until(deadline):
            if (reply := self._pull_reply(message_id)) is not None:
                return reply
        return None


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Turns any error between server app and SuperLink into `WorkerDied`, so that the run is saved."""
    try:
        yield
    except WorkerDied:
        raise
    except Exception as error:
        raise WorkerDied(f"the SuperLink can't be reached: {type(error).__name__}: {error}") from error


def _poll_until(deadline: float) -> Iterator[None]:
    """Yields at once, then again and again with growing pauses, until the deadline has passed."""
    pause = 0.005
    yield
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(0.5, 1.5 * pause)
        yield


def _read_reply(reply: RecordDict | str, reader: Callable[[RecordDict], T]) -> T | str:
    """What `reader` makes of a reply, or the reason why it is of no use; never raises, whatever a client sends."""
    if isinstance(reply, str):
        return reply.splitlines()[0][:MAX_REASON_LENGTH]
    try:
        reason = wire.failure_reason(reply)
        return reader(reply) if reason is None else reason[:MAX_REASON_LENGTH]
    except Exception as error:
        return f"its answer can't be read: {type(error).__name__}: {error}"[:MAX_REASON_LENGTH]

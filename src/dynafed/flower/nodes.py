"""Which node serves which partition: nodes are queried when they come, and refused with a reason."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from flwr.app import ConfigRecord, RecordDict

from dynafed.errors import UserError, WorkerDied
from dynafed.flower import wire
from dynafed.flower.app_config import AppConfig
from dynafed.flower.link import Link, poll_until, read_reply
from dynafed.flower.node_keys import der_from_pem, read_node_keys

log = logging.getLogger("dynafed")

MAX_REASONS = 10
"""Refused nodes that an error names."""

T = TypeVar("T")


class NodeDirectory(Generic[T]):
    """The nodes that take part. Of several that claim a partition, the first one serves it until it leaves.

    A new node is sent a message of `message_type` with `records`. `accept` reads what its answer says beside its
    partition, and raises `UserError` with the reason if the node may not take part.
    """

    def __init__(
        self,
        link: Link,
        app_config: AppConfig,
        clients: int,
        accept: Callable[[RecordDict], T],
        message_type: str = "query",
        records: Mapping[str, ConfigRecord] | None = None,
    ) -> None:
        self.link, self.app_config, self.accept = link, app_config, accept
        self.message_type, self.records = message_type, dict(records or {})
        self.num_partitions = app_config.num_partitions or clients
        self.wanted = app_config.min_nodes or min(self.num_partitions, clients)
        """Nodes that must be there to begin."""
        keys = app_config.node_keys
        self.partition_of_key = read_node_keys(Path(keys).expanduser(), self.num_partitions) if keys else {}
        self.pending_queries: dict[int, str] = {}
        """Node -> id of the query, as long as there is no reply."""
        self.partition_of: dict[int, int] = {}
        """In the order in which the nodes answered, those that claim a taken partition included."""
        self.accepted: dict[int, T] = {}
        """Node -> what `accept` returned."""
        self.rejected: dict[int, str] = {}
        """Node -> why it can't take part."""
        self.started = False

    def serving(self) -> dict[int, int]:
        """Partition -> the first node that claimed it."""
        return {partition: node for node, partition in reversed(self.partition_of.items())}

    def reject(self, node: int, reason: str) -> None:
        """Leave out a node that was accepted before."""
        del self.partition_of[node], self.accepted[node]
        self.rejected[node] = reason
        _warn(node, reason)

    def wait(self, clients: Collection[int] = (), settled: Callable[[], bool] = lambda: True) -> None:
        """Before the first message, wait for all the nodes; later on, only if none is there for any of `clients`.

        `settled` is asked when they are there, and may reject some of them.
        """
        for _ in poll_until(time.monotonic() + self.app_config.wait):
            self.update()
            serving = self.serving()
            if not self.started and len(serving) >= self.wanted and settled():
                self.started = True
                return
            if self.started and (not clients or any(client % self.num_partitions in serving for client in clients)):
                return
        reasons = [f"; node {node}: {reason}" for node, reason in sorted(self._refusals().items())]
        if len(reasons) > MAX_REASONS:
            reasons[MAX_REASONS:] = [f"; and {len(reasons) - MAX_REASONS} more"]
        refused = "".join(reasons)
        here = f"{len(self.serving())} of {self.wanted} nodes are here after {self.app_config.wait:g} seconds"
        if not self.started:
            raise UserError(f"{here}: start the others, or set dynafed-min-nodes or dynafed-wait{refused}")
        raise WorkerDied(f"{here}, and none that serves a client of this round{refused}")

    def update(self) -> None:
        """Query the nodes that are new, read the replies that are there, drop the nodes that left."""
        present = self.link.nodes(keys=bool(self.partition_of_key))
        for known in (self.pending_queries, self.partition_of, self.accepted, self.rejected):
            for node in known.keys() - present.keys():
                del known[node]
        refused = self._refusals()
        for node in sorted(present.keys() - {*self.pending_queries, *self.partition_of, *self.rejected}):
            if message_id := self.link.send(
                node, self.message_type, RecordDict(dict(self.records)), self.app_config.wait, "0"
            ):
                self.pending_queries[node] = message_id
        for node, message_id in list(self.pending_queries.items()):
            if (reply := self.link.pull_reply(node, message_id)) is None:
                continue
            del self.pending_queries[node]
            answer = read_reply(reply, partial(self._check, present[node]))
            if isinstance(answer, str):
                self.rejected[node] = answer
            else:
                self.partition_of[node], self.accepted[node] = answer
        for node, reason in self._refusals().items():
            if refused.get(node) != reason:
                _warn(node, reason)

    def _refusals(self) -> dict[int, str]:
        """Node -> why it doesn't take part now."""
        serving = self.serving()
        return self.rejected | {
            node: f"partition {partition} is served by node {serving[partition]}, which came first"
            for node, partition in self.partition_of.items()
            if serving[partition] != node
        }

    def _check(self, public_key: bytes, content: RecordDict) -> tuple[int, T]:
        """A node's partition, and what `accept` returns; raises `UserError` if it may not take part."""
        partition, num_partitions = wire.read_node_info(content)
        if num_partitions not in (None, self.num_partitions):
            raise UserError(f"its num-partitions = {num_partitions}, the server's is {self.num_partitions}")
        if not 0 <= partition < self.num_partitions:
            raise UserError(f"its partition-id = {partition} is not one of 0 to {self.num_partitions - 1}")
        if self.partition_of_key:
            bound = self.partition_of_key.get(der_from_pem(public_key))
            if bound is None:
                raise UserError("its public key is not in the list of dynafed-node-keys")
            if bound != partition:
                raise UserError(f"its public key is bound to partition {bound}, not to its partition-id = {partition}")
        return partition, self.accept(content)


def _warn(node: int, reason: str) -> None:
    log.warning("node %d can't take part: %s", node, reason)

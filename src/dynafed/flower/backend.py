"""Trains clients on Flower's nodes in place of worker processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from dynafed.engine.backend import evaluate
from dynafed.engine.client_store import ReceiptStore
from dynafed.engine.federation import Federation
from dynafed.errors import UserError, WorkerDied
from dynafed.execution import keep_freed_memory
from dynafed.flower import wire
from dynafed.flower.app_config import AppConfig
from dynafed.flower.node_keys import der_from_pem, read_node_keys
from dynafed.messages import Broadcast, Update
from dynafed.tree import Tree

log = logging.getLogger("dynafed")

MAX_FAILED_ATTEMPTS = 3
"""A run ends when all clients failed in so many attempts in a row."""

MAX_REASON_LENGTH = 300
"""Characters of a client's failure reason that are kept."""

MAX_REASONS = 10
"""Refused nodes that an error names."""

T = TypeVar("T")


class FlowerBackend:
    """Trains clients on Flower's nodes, and evaluates in this process.

    Client c is served by the node whose partition is c modulo the number of partitions, which the server's config says.
    With one partition for each client, that is one node a client. Of several nodes that claim a partition, the first
    one serves it until it leaves.
    """

    tolerate_failures: ClassVar[bool] = True
    """Whether a round goes on without a client that fails."""

    def __init__(self, federation: Federation, app_config: AppConfig, grid: Grid | None = None) -> None:
        self.federation = federation
        self.threads_before = torch.get_num_threads()
        self.app_config = app_config
        self._grid = grid
        self.num_partitions = app_config.num_partitions or federation.config.clients
        keys = app_config.node_keys
        self.partition_of_key = read_node_keys(Path(keys).expanduser(), self.num_partitions) if keys else {}
        self.pending_queries: dict[int, str] = {}
        """Node -> id of the node-info query, as long as there is no reply."""
        self.partition_of_node: dict[int, int] = {}
        """In the order in which the nodes answered, those that claim a taken partition included."""
        self.rejected_nodes: dict[int, str] = {}
        """Node -> why it can't take part."""
        self.started = False
        self.failed_attempts = 0

    @property
    def grid(self) -> Grid:
        """The connection to the nodes."""
        assert self._grid is not None
        return self._grid

    def __enter__(self) -> FlowerBackend:
        keep_freed_memory()
        torch.set_num_threads(self.federation.config.threads)
        return self

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self.threads_before)

    def evaluate(self, model: Tree) -> tuple[float, float]:
        """Accuracy and mean loss on the evaluation split, computed in the server's process."""
        return evaluate(self.federation, model)

    def client_store(self, folder: Path, limit: int, listing: Mapping[int, tuple[int, str]] | None) -> ReceiptStore:
        """Clients keep their states; the server keeps receipts."""
        return ReceiptStore(folder, limit, listing)

    def setup_clients(self) -> Iterator[Tree]:
        """What each client that has data sends once, before round 1; an empty tree for one that fails."""
        clients = [*filter(self.federation.has_data, range(self.federation.problem.clients))]
        requests = {client: RecordDict() for client in clients}
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
        self, broadcast: Broadcast, cohort: Iterable[tuple[int, float]], load_state: Callable[[int], Tree]
    ) -> Iterator[tuple[Update, Tree]]:
        """Updates of the clients of `cohort` and receipts of their states, in that order, as they arrive."""
        records, round_num = wire.pack_broadcast(broadcast), broadcast.round
        requests = {client: wire.train_request(records, work, load_state(client)) for client, work in cohort}
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
        """Each client's reply, in the order of `requests`; where there is none that counts, the reason."""
        self._wait_for_nodes(requests)
        node_of, sent = self._node_of_partition(), dict[int, tuple[int, str]]()
        for client, content in requests.items():
            wire.add_task(content, round_num, client)
            if (node := node_of.get(client % self.num_partitions)) is not None:
                message_id = self._send(node, message_type, content, self.app_config.timeout, str(round_num))
                sent |= {client: (node, message_id)} if message_id else {}
        deadline = time.monotonic() + self.app_config.timeout
        for client, content in requests.items():
            # Replies stay at the SuperLink until it is their turn, so only one of them is held here.
            if client not in sent:
                yield client, "no node that serves it is connected"
            elif (reply := self._wait_for_reply(*sent[client], deadline)) is None:
                yield client, f"no answer within {self.app_config.timeout:g} seconds"
            else:
                problem = _read_reply(reply, partial(wire.check_task, content), failures=False)
                yield client, problem or reply

    def _wait_for_nodes(self, clients: Collection[int]) -> None:
        """Before the first message, wait for all the nodes; later on, only if none is there for any of `clients`."""
        wanted = self.app_config.min_nodes or min(self.num_partitions, self.federation.config.clients)
        for _ in _poll_until(time.monotonic() + self.app_config.wait):
            self._update_nodes()
            node_of = self._node_of_partition()
            if not self.started and len(node_of) >= wanted:
                self.started = True
                return
            if self.started and (not clients or any(client % self.num_partitions in node_of for client in clients)):
                return
        reasons = [f"; node {node}: {reason}" for node, reason in sorted(self._refusals().items())]
        if len(reasons) > MAX_REASONS:
            reasons[MAX_REASONS:] = [f"; and {len(reasons) - MAX_REASONS} more"]
        refused = "".join(reasons)
        here = f"{len(node_of)} of {wanted} nodes are here after {self.app_config.wait:g} seconds"
        if not self.started:
            raise UserError(f"{here}: start the others, or set dynafed-min-nodes or dynafed-wait{refused}")
        raise WorkerDied(f"{here}, and none that serves a client of this round{refused}")

    def _node_of_partition(self) -> dict[int, int]:
        """Partition -> the first node that claimed it."""
        return {partition: node for node, partition in reversed(self.partition_of_node.items())}

    def _refusals(self) -> dict[int, str]:
        """Node -> why it doesn't take part now."""
        node_of = self._node_of_partition()
        return self.rejected_nodes | {
            node: f"partition {partition} is served by node {node_of[partition]}, which came first"
            for node, partition in self.partition_of_node.items()
            if node_of[partition] != node
        }

    def _update_nodes(self) -> None:
        """Query the nodes that are new, read the replies that are there, drop the nodes that left."""
        with _connection_errors():
            if self.partition_of_key:
                present = {info.node_id: info.public_key for info in self.grid.get_nodes()}
            else:
                present = dict.fromkeys(self.grid.get_node_ids(), b"")
        for known in (self.pending_queries, self.partition_of_node, self.rejected_nodes):
            for node in known.keys() - present.keys():
                del known[node]
        refused = self._refusals()
        for node in sorted(present.keys() - {*self.pending_queries, *self.partition_of_node, *self.rejected_nodes}):
            if message_id := self._send(node, "query", RecordDict(), self.app_config.wait, "0"):
                self.pending_queries[node] = message_id
        for node, message_id in list(self.pending_queries.items()):
            if (reply := self._pull_reply(node, message_id)) is None:
                continue
            del self.pending_queries[node]
            partition = _read_reply(reply, partial(self._check_node, present[node]))
            if isinstance(partition, str):
                self.rejected_nodes[node] = partition
            else:
                self.partition_of_node[node] = partition
        for node, reason in self._refusals().items():
            if refused.get(node) != reason:
                log.warning("node %d can't take part: %s", node, reason)

    def _check_node(self, public_key: bytes, content: RecordDict) -> int:
        """The partition of a node that may take part; raises `UserError` with the reason if it may not."""
        partition, num_partitions, fingerprint = wire.read_node_info(content)
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
        if fingerprint != self.federation.fingerprint:
            raise UserError("it has other data, another split or another network than the server")
        return partition

    def _send(self, node: int, message_type: str, content: RecordDict, seconds: float, group_id: str) -> str | None:
        """The id of the message, or None if the node is not there any more."""
        message = Message(content, dst_node_id=node, message_type=message_type, ttl=seconds, group_id=group_id)
        with _connection_errors():
            return next(iter(self.grid.push_messages([message])), None)

    def _pull_reply(self, node: int, message_id: str) -> RecordDict | str | None:
        """The content of the reply, or the reason why there is none, or None as long as it hasn't arrived."""
        try:
            replies = list(self.grid.pull_messages([message_id]))
        except (WorkerDied, OSError) as error:
            raise _as_worker_died(error) from error
        except Exception as error:
            # Flower decodes replies here, so a broken one raises. If the SuperLink still answers, it is to blame.
            with _connection_errors():
                list(self.grid.get_node_ids())
            return _unreadable(error)
        try:
            return next((_content(reply, node, message_id) for reply in replies), None)
        except Exception as error:
            return _unreadable(error)

    def _wait_for_reply(self, node: int, message_id: str, deadline: float) -> RecordDict | str | None:
        for _ in _poll_until(deadline):
            if (reply := self._pull_reply(node, message_id)) is not None:
                return reply
        return None


def _content(reply: Message, node: int, message_id: str) -> RecordDict | str:
    if reply.has_error():
        return (reply.error.reason or "").strip() or "it failed"
    if (reply.metadata.src_node_id, reply.metadata.reply_to_message_id) != (node, message_id):
        return "its answer is from another node, or to another message"
    return reply.content if isinstance(reply.content, RecordDict) else "its answer holds no records"


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Turns any error between server app and SuperLink into `WorkerDied`, so that the run is saved."""
    try:
        yield
    except Exception as error:
        raise _as_worker_died(error) from error


def _as_worker_died(error: Exception) -> WorkerDied:
    if isinstance(error, WorkerDied):
        return error
    return WorkerDied(f"the SuperLink can't be reached: {type(error).__name__}: {error}")


def _poll_until(deadline: float) -> Iterator[None]:
    """Yields at once, then again and again with growing pauses, until the deadline has passed."""
    pause = 0.005
    yield
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(0.5, 1.5 * pause)
        yield


def _read_reply(reply: RecordDict | str, reader: Callable[[RecordDict], T], failures: bool = True) -> T | str:
    """What `reader` returns for a reply, or the reason why it is of no use; never raises, whatever a client sends.

    With `failures`, a reply that says that the client failed is such a reason.
    """
    if isinstance(reply, str):
        return _one_line(reply)
    try:
        reason = wire.failure_reason(reply) if failures else None
        return reader(reply) if reason is None else _one_line(reason)
    except UserError as error:
        return _one_line(str(error))
    except Exception as error:
        return _unreadable(error)


def _unreadable(error: Exception) -> str:
    return _one_line(f"its answer can't be read: {type(error).__name__}: {error}")


def _one_line(text: str) -> str:
    """The first line, without what a terminal would obey; never empty."""
    first = next(iter(text[: 10 * MAX_REASON_LENGTH].strip().splitlines()), "")
    printable = "".join(each if each.isprintable() else "?" for each in first)
    return printable[:MAX_REASON_LENGTH] or "it gave no reason"

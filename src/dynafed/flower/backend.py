"""Trains clients on Flower's nodes in place of worker processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from dynafed.engine.client_store import ClientStore, ReceiptStore
from dynafed.engine.evaluation import Part, empty_tally, evaluate, evaluate_part, evaluation_parts, metrics
from dynafed.engine.federation import Federation
from dynafed.errors import UserError, WorkerDied
from dynafed.execution import keep_freed_memory
from dynafed.flower import wire
from dynafed.flower.app_config import AppConfig
from dynafed.flower.link import Link, read_reply
from dynafed.flower.nodes import NodeDirectory
from dynafed.flower.own_data import NodeClients
from dynafed.messages import Broadcast, Update
from dynafed.tasks import Tally
from dynafed.tree import Tree

log = logging.getLogger("dynafed")

MAX_FAILED_ATTEMPTS = 3
"""A run ends when all clients failed in so many attempts in a row."""


class FlowerBackend:
    """Trains clients on Flower's nodes, and evaluates in this process.

    Client c is served by the node whose partition is c modulo the number of partitions, which the server's config says.
    With one partition for each client, that is one node a client.
    """

    tolerate_failures: ClassVar[bool] = True
    """Whether a round goes on without a client that fails."""
    holds_receipts: ClassVar[bool] = True
    """Whether clients keep their states, and the server has receipts."""

    def __init__(
        self,
        federation: Federation,
        app_config: AppConfig,
        grid: Grid | None = None,
        records: Mapping[str, ConfigRecord] | None = None,
        refused: Mapping[int, str] | None = None,
    ) -> None:
        """Every request carries `records`, too; `refused` are nodes that can't take part, with the reasons."""
        if federation.config.secure_aggregation:
            raise UserError(
                "secure_aggregation is simulated in this process, which would protect nobody on Flower: it has "
                "SecAgg+ of its own; set secure_aggregation = false, or engine = 'local'"
            )
        self.federation = federation
        self.threads_before = torch.get_num_threads()
        self.app_config = app_config
        self._grid = grid
        self.link = Link(lambda: self.grid)
        self.records = dict(records or {})
        self.nodes = NodeDirectory(
            self.link, app_config, federation.config.clients, self._check_fingerprint, records=self.records
        )
        self.nodes.rejected |= refused or {}
        self.failed_attempts = 0
        self.round = 0
        """The one that is under way."""

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

    def evaluate(self, model: Tree) -> dict[str, Any]:
        """A model's metrics, computed in the server's process; on what only clients have, by their nodes."""
        if not isinstance(self.federation.data, NodeClients):
            return evaluate(self.federation, model)
        parts = evaluation_parts(self.federation)
        return metrics(self.federation, parts, self._tallies(parts, model))

    def _tallies(self, parts: Sequence[Part], model: Tree) -> Iterator[Tally]:
        """The parts' tallies, in their order; an empty one for a client that fails."""
        for part in parts:
            if part[0] == "split":
                yield evaluate_part(self.federation, model, *part)
        clients = [number for kind, number, _ in parts if kind == "client"]
        expected = empty_tally(self.federation.problem)
        records, failures = wire.evaluate_request(model), []
        requests = {client: RecordDict(dict(records)) for client in clients}
        for client, reply in self._exchange("evaluate", self.round, requests):
            found = read_reply(reply, partial(wire.read_evaluate_reply, expected=expected))
            if isinstance(found, str):
                failures.append(f"client {client}: {found}")
                log.warning("round %d, evaluation, %s", self.round, failures[-1])
            if len(failures) == len(clients):
                raise WorkerDied(f"no client could evaluate the model; the last one is {failures[-1]}")
            yield expected if isinstance(found, str) else found

    def client_store(self, folder: Path, limit: int, listing: Mapping[int, tuple[int, str]] | None) -> ClientStore:
        """The clients' states, or receipts of them."""
        return (ReceiptStore if self.holds_receipts else ClientStore)(folder, limit, listing)

    def setup_clients(self) -> Iterator[Tree]:
        """What each client that has data sends once, before round 1; an empty tree for one that fails."""
        clients = [*filter(self.federation.has_data, range(self.federation.problem.clients))]
        requests = {client: RecordDict() for client in clients}
        failures = []
        for client, reply in self._exchange("query.setup", 0, requests):
            tensors = read_reply(reply, wire.read_setup_reply)
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
        records, self.round = wire.pack_broadcast(broadcast), broadcast.round
        round_num = self.round
        requests = {client: wire.train_request(records, work, load_state(client)) for client, work in cohort}
        failures = []
        for client, reply in self._exchange("train", round_num, requests):
            result = read_reply(reply, partial(wire.read_train_reply, client=client, receipts=self.holds_receipts))
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
        self.nodes.wait(requests)
        serving, sent = self.nodes.serving(), dict[int, tuple[int, str]]()
        for client, content in requests.items():
            wire.add_task(content, round_num, client)
            content.update(self.records)
            if (node := serving.get(client % self.nodes.num_partitions)) is not None:
                message_id = self.link.send(node, message_type, content, self.app_config.timeout, str(round_num))
                sent |= {client: (node, message_id)} if message_id else {}
        deadline = time.monotonic() + self.app_config.timeout
        for client, content in requests.items():
            # Replies stay at the SuperLink until it is their turn, so only one of them is held here.
            if client not in sent:
                yield client, "no node that serves it is connected"
            elif (reply := self.link.wait_for_reply(*sent[client], deadline)) is None:
                yield client, f"no answer within {self.app_config.timeout:g} seconds"
            else:
                problem = read_reply(reply, partial(wire.check_task, content), failures=False)
                yield client, problem or reply

    def _check_fingerprint(self, content: RecordDict) -> None:
        if wire.read_fingerprint(content) != self.federation.fingerprint:
            raise UserError("it has other data, another split or another network than the server")

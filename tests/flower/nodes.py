"""Flower's nodes in this process, each with its own context: no network, no Ray."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from dynafed.engine.federation import Federation
from dynafed.flower.app_config import AppConfig
from dynafed.flower.apps import NodeSide, make_client_app
from dynafed.flower.backend import FlowerBackend

QUICK: dict[str, Any] = {
    "dynafed.trajectory": 2,
    "dynafed.segment": 1,
    "dynafed.targets": "[1]",
    "dynafed.samples": 10,
    "dynafed.iterations": 2,
    "dynafed.inner_steps": 1,
    "dynafed.finetune_steps": 1,
}
"""DynaFed in a blink, as an app's config says it."""

Tamper = Callable[[Message, Message], Message | None]
"""Is given a message and its reply, and may give another reply, or none."""


def backend_on_nodes(federation: Federation, path: Path) -> FlowerBackend:
    """A run's backend: eight nodes in this process."""
    nodes = Nodes(make_client_app(lambda context, content: NodeSide(federation)), 8)
    return FlowerBackend(federation, AppConfig(wait=0.1, timeout=0.1, num_partitions=8), nodes)


class Nodes(Grid):
    """A grid of nodes that answer at once."""

    run = None  # type: ignore[assignment]

    def __init__(
        self,
        app: ClientApp,
        partitions: int,
        run_config: Mapping[str, Any] | None = None,
        tamper: Tamper = lambda message, reply: reply,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.partitions, self.run_config, self.tamper = app, partitions, dict(run_config or {}), tamper
        self.contexts = {1000 + 7 * partition: self.context(partition) for partition in reversed(range(partitions))}
        self.replies: dict[str, Message | None] = {}
        self.numbers = itertools.count()

    def context(self, partition: int, **config: Any) -> Context:
        node_config = {"partition-id": partition, "num-partitions": self.partitions} | config
        return Context(1, 0, node_config, RecordDict(), self.run_config)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            name = f"message {next(self.numbers)}"
            message.metadata.__dict__["_message_id"] = name
            if (context := self.contexts.get(message.metadata.dst_node_id)) is None:
                continue
            before = copy.deepcopy(context.state)
            try:
                reply = self.app(message, context)
            except Exception as error:
                context.state = before
                reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
            self.replies[name] = self.tamper(message, reply)
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = [self.replies.pop(name) for name in message_ids if self.replies.get(name) is not None]
        return [reply for reply in replies if reply is not None]

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

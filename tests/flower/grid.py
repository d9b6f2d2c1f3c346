"""Flower without network or Ray: a grid whose nodes are a function in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Client = Callable[[int, Message], RecordDict]
"""What a node, by its number from 1, answers to a message; whatever it raises becomes an error reply."""


class LocalGrid(Grid):
    """Delivers every message at once, and the replies in the order of the nodes."""

    run = None  # type: ignore[assignment]

    def __init__(self, nodes: int, client: Client) -> None:
        self.nodes, self.client = nodes, client
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # every message asks for its sender

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self.nodes + 1)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        ordered = sorted(messages, key=lambda message: message.metadata.dst_node_id)
        return [self._reply(message.metadata.dst_node_id, message) for message in ordered]

    def _reply(self, node: int, message: Message) -> Message:
        try:
            return Message(self.client(node, message), reply_to=message)
        except Exception as error:
            return Message(Error(0, str(error)), reply_to=message)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError


def answer(arrays: ArrayRecord, **metrics: float) -> RecordDict:
    """What a client's train function returns; every client has as many examples."""
    return RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1} | metrics)})

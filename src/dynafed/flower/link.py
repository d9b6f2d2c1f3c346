"""Messages between the server app and its nodes: sent, awaited, and read without trusting what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from dynafed.errors import UserError, WorkerDied, printable
from dynafed.flower import wire

MAX_REASON_LENGTH = 300
"""Characters of a client's failure reason that are kept."""

T = TypeVar("T")


class Link:
    """Sends messages to nodes through Flower's grid, and gets their replies."""

    def __init__(self, connect: Callable[[], Grid]) -> None:
        self.connect = connect

    @property
    def grid(self) -> Grid:
        """The connection to the nodes."""
        return self.connect()

    def nodes(self, keys: bool) -> dict[int, bytes]:
        """The nodes that are there, with their public keys if `keys`."""
        with _connection_errors():
            if keys:
                return {info.node_id: info.public_key for info in self.grid.get_nodes()}
            return dict.fromkeys(self.grid.get_node_ids(), b"")

    def send(self, node: int, message_type: str, content: RecordDict, seconds: float, group_id: str) -> str | None:
        """The id of the message, or None if the node is not there any more."""
        message = Message(content, dst_node_id=node, message_type=message_type, ttl=seconds, group_id=group_id)
        with _connection_errors():
            return next(iter(self.grid.push_messages([message])), None)

    def pull_reply(self, node: int, message_id: str) -> RecordDict | str | None:
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

    def wait_for_reply(self, node: int, message_id: str, deadline: float) -> RecordDict | str | None:
        """The same, or None if nothing has arrived by the deadline."""
        for _ in poll_until(deadline):
            if (reply := self.pull_reply(node, message_id)) is not None:
                return reply
        return None


def poll_until(deadline: float) -> Iterator[None]:
    """Yields at once, then again and again with growing pauses, until the deadline has passed."""
    pause = 0.005
    yield
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(0.5, 1.5 * pause)
        yield


def read_reply(reply: RecordDict | str, reader: Callable[[RecordDict], T], failures: bool = True) -> T | str:
    """What `reader` returns for a reply, or the reason why it is of no use; never raises, whatever a client sends.

    With `failures`, a reply that says that the client failed is such a reason.
    """
    if isinstance(reply, str):
        return one_line(reply)
    try:
        reason = wire.failure_reason(reply) if failures else None
        return reader(reply) if reason is None else one_line(reason)
    except UserError as error:
        return one_line(str(error))
    except Exception as error:
        return _unreadable(error)


def one_line(text: str) -> str:
    """The first line, without what a terminal would obey; never empty."""
    first = next(iter(text[: 10 * MAX_REASON_LENGTH].strip().splitlines()), "")
    return printable(first, MAX_REASON_LENGTH) or "it gave no reason"


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


def _unreadable(error: Exception) -> str:
    return one_line(f"its answer can't be read: {type(error).__name__}: {error}")

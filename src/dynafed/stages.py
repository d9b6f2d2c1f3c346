"""What a long piece of work is doing right now, told to whoever shows it to the user.

`stage("loading cifar10")` is called where the work is done, `showing(listener)` by what shows it. Without a listener,
nothing happens. What happens in a run's rounds goes to its callbacks; this is for the rest, such as the seconds before
the first round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

T = TypeVar("T")


class Listener(Protocol):
    """Shows what is going on."""

    def on_stage(self, name: str, done: int, total: int) -> None:
        """`done` of `total` steps of this stage are done; a `total` of 0 means that nobody knows how many there are."""

    def on_next_run(self, title: str, number: int, total: int) -> None:
        """Of `total` runs, the one with this number (from 1) begins."""


class Silent:
    """Shows nothing; what runs within `showing(Silent())` doesn't look for anyone else, either."""

    def on_stage(self, name: str, done: int, total: int) -> None:
        """Do nothing."""

    def on_next_run(self, title: str, number: int, total: int) -> None:
        """Do nothing."""


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def current() -> Listener | None:
    """Who is told, if anyone is."""
    return _listener.get()


@contextmanager
def showing(listener: Listener) -> Iterator[None]:
    """Within it, `listener` is told, and nobody else."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def stage(name: str, done: int = 0, total: int = 0) -> None:
    """Say what is being done, and how much of it is done."""
    if (listener := current()) is not None:
        listener.on_stage(name, done, total)


def next_run(title: str, number: int, total: int) -> None:
    """Say that the run with this number (from 1) begins, of `total`."""
    if (listener := current()) is not None:
        listener.on_next_run(title, number, total)


def counted(name: str, items: Iterable[T], total: int | None = None) -> Iterator[T]:
    """The items, each told of as it comes; `total` is their number, if `len` doesn't tell."""
    if total is None:
        total = len(items) if isinstance(items, Sized) else 0
    stage(name, 0, total)
    for number, item in enumerate(items, 1):
        stage(name, number, total)
        yield item

"""Stopping a run from outside without losing work."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Stopped(Exception):
    """Somebody asked the run to stop."""


class StopRequest:
    """While it is entered, Ctrl-C or SIGTERM is only noted, and `check` raises `Stopped` where it is safe.

    A second Ctrl-C interrupts at once, as usual. SIGTERM often comes twice, and is only noted both times.
    """

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def check(self) -> None:
        """Raise `Stopped` if somebody asked for it."""
        if self.asked:
            raise Stopped

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGINT:
            signal.signal(number, self.before.pop(signal.SIGINT, signal.default_int_handler))

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

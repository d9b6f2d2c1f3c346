"""Stopping a run from outside without losing work."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from dynafed.stages import stage

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""That ask a run to stop; a terminal that is closed sends SIGHUP."""


class Stopped(Exception):
    """Raised by `StopSignal.check` after the run was asked to stop."""


class StopSignal:
    """While it is entered, Ctrl-C, SIGTERM or SIGHUP is only noted, and `check` raises `Stopped` where it is safe.

    A second Ctrl-C interrupts at once, as usual. SIGTERM often comes twice, and is only noted both times.
    """

    def __init__(self) -> None:
        self.requested = False
        self.handlers_before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has asked for that
                    self.handlers_before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler)
        self.handlers_before = {}

    def check(self) -> None:
        """Raise `Stopped` if the run was asked to stop."""
        if self.requested:
            raise Stopped

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            stage("stopping (Ctrl-C again: at once)")
            signal.signal(number, self.handlers_before.pop(signal.SIGINT, signal.default_int_handler))

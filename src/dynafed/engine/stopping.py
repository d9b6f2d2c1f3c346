"""Why a run ends before its last round: somebody stops it, or nothing gets through any more."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from dynafed.callbacks import Record
from dynafed.engine.trust import resume_command
from dynafed.errors import Interrupted, RunFailed, UserError
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
                nohup = number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN
                if not nohup:
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


def check_failed_rounds(allowed: int, history: list[Record], ended: bool = False) -> None:
    """End a run in which nothing gets through any more; `allowed` failed rounds in a row are too many.

    So are fewer, if there are no others and the run has `ended`.
    """
    last = history[-allowed:]
    enough = len(last) == allowed or (ended and last == history)
    if allowed and last and enough and all(record.get("skipped") for record in last):
        reasons = [f"client {each['client']}: {each['reason']}" for record in last for each in record["rejected"]]
        raise RunFailed(
            f"{len(last)} rounds in a row failed (max_failed_rounds), the last is round {last[-1]['round']}"
            + (f"; {reasons[-1]}" if reasons else "; no client sent an update")
        )


def explain_failure(error: Exception, path: Path) -> BaseException:
    """What is raised in an error's place, with the command that continues the run."""
    if isinstance(error, Stopped):
        return Interrupted(f"interrupted; continue with: {resume_command(path)}", path)
    if isinstance(error, RunFailed):
        return type(error)(f"{error}; continue with: {resume_command(path)}")
    if not isinstance(error, UserError):
        error.add_note(f"continue with: {resume_command(path)}")
    return error

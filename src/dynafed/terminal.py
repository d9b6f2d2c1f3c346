"""The progress bar: in a terminal, in a notebook, or as a line every so often where there is neither."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from dynafed import stages
from dynafed.callbacks import Callback, Record, RunContext
from dynafed.progress import Progress, RunProgress, clock, format_metric

P = ParamSpec("P")
R = TypeVar("R")

FIRST_LINE, BETWEEN_LINES, GROWTH = 10.0, 30.0, 0.05
"""Where there is no terminal: seconds before the first line and between two, which grow with the time passed."""


class View:
    """Shows progress somewhere; drawn anew every `period` seconds, by a thread."""

    period = 0.2

    def open(self) -> None:
        """Called before the first drawing, and after a pause."""

    def draw(self, progress: Progress) -> None:
        """Show how far it is."""

    def close(self) -> None:
        """Called after the last drawing, and before a pause."""

    def say(self, line: str) -> None:
        """Show a line that stays."""


class TerminalView(View):
    """Bars at the bottom of a terminal, which go when they aren't needed any more."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Live | None = None

    def open(self) -> None:
        """Begin the bars."""
        self.live = Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            # Else what a script prints to a file would go to the terminal instead.
            redirect_stdout=sys.stdout.isatty(),
        )
        self.live.start()

    def draw(self, progress: Progress) -> None:
        """Draw the bars."""
        if self.live is not None:
            self.live.update(frame(progress), refresh=True)

    def close(self) -> None:
        """Remove the bars."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self.console.print(line, highlight=False)


class LineView(View):
    """A line every so often, for logs."""

    period = 1.0

    def __init__(self, console: Console) -> None:
        self.console = console
        self.began = time.monotonic()
        self.due = self.began + FIRST_LINE

    def draw(self, progress: Progress) -> None:
        """Print a line if it is time for one."""
        now = time.monotonic()
        if now >= self.due:
            self.due = now + max(BETWEEN_LINES, GROWTH * (now - self.began))
            self.say(str(progress))

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(f"{time.strftime('%H:%M:%S')} {line}", highlight=False, soft_wrap=True)


def frame(progress: Progress) -> RenderableType:
    """What a terminal shows: the run's bar, what it is at, and all the runs' bar if there are several."""
    run = progress.run
    lines: list[RenderableType] = []
    if run.rounds:
        measured = f"  {run.measured()}" if run.value is not None else ""
        epsilon = f"  epsilon {run.epsilon:.2f}" if run.epsilon is not None else ""
        words = f"round {run.round}/{run.rounds}{measured}{epsilon}{_time_left(run.left())}"
        lines.append(_bar(run.title, run.round, run.rounds, words))
    stage = run.stage
    if not run.round_seconds or run.busy():
        name = f"  {stage.name}" if run.rounds else f"{run.title}: {stage.name}".removeprefix(": ")
        count = f"{stage.done}/{stage.total}" if stage.total else clock(stage.seconds())
        lines.append(_bar(name, stage.done, stage.total, count + _time_left(stage.left())))
    else:
        lines.append(Text(f"  {run.pace() or 0:.2f} s a round", style="dim"))
    if progress.total > 1:
        words = f"run {progress.number} of {progress.total}{_time_left(progress.left(), ' in all')}"
        lines.append(_bar("all runs", progress.number - 1, progress.total, words))
    return Group(*lines)


def _bar(title: str, done: int, total: int, words: str) -> Table:
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(no_wrap=True, max_width=34)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    bar = Bar(total=total or None, completed=done, pulse=not total, animation_time=time.monotonic())
    table.add_row(Text(title), bar, Text(words))
    return table


def _time_left(seconds: float | None, of: str = "") -> str:
    return "" if seconds is None else f"  {clock(seconds)} left{of}"


class ProgressBar(Callback):
    """Follows one or several runs, one after the other, and shows how far they are.

    Use it as a context manager: it shows something at once, and what happens before the first round, too.
    """

    def __init__(self, title: str, console: Console, view: View | None = None) -> None:
        drawn = console.is_terminal and not console.is_dumb_terminal
        self.view = view or (TerminalView(console) if drawn else LineView(console))
        self.progress = Progress(RunProgress(title))
        self.stack = ExitStack()
        self.quit = threading.Event()
        self.thread: threading.Thread | None = None

    def __enter__(self) -> ProgressBar:
        self.stack.enter_context(stages.showing(self))
        self.stack.enter_context(_paused_during_forks(self))
        self.resume()
        self.stack.callback(self.pause)
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def resume(self) -> None:
        """Show it, now and from now on."""
        self.view.open()
        self.view.draw(self.progress)
        self.quit.clear()
        self.thread = threading.Thread(target=self._draw, name="progress", daemon=True)
        self.thread.start()

    def pause(self) -> None:
        """Stop showing it, and end the thread."""
        if self.thread is not None:
            self.quit.set()
            if self.thread.is_alive():  # not while Ctrl-C interrupts its start
                self.thread.join()
            self.thread = None
        self.view.close()

    def abandon(self) -> None:
        """Stop showing it in a signal handler: without waiting for the thread, which may be just starting."""
        self.quit.set()
        self.view.close()

    def _draw(self) -> None:
        while not self.quit.wait(self.view.period):
            self.view.draw(self.progress)

    def titled(self, title: str) -> list[Callback]:
        """This bar, for the next run."""
        self.progress.run = RunProgress(title)
        return [self]

    def on_next_run(self, title: str, number: int, total: int) -> None:
        """Begin the next of several runs."""
        self.progress.run = RunProgress(title)
        self.progress.number, self.progress.total = number, total

    def on_stage(self, name: str, done: int, total: int) -> None:
        """Show what is being done."""
        self.progress.run.enter(name, done, total)

    def on_run_begin(self, run: RunContext) -> None:
        """Show the rounds."""
        from dynafed.attacks import attack_settings

        shown = self.progress.run
        shown.rounds, shown.round = run.config.rounds, run.round
        shown.title = (shown.title or run.config.method) + (", attacked" if attack_settings(run.config) else "")
        for record in run.history:
            shown.measure(record)

    def on_round_begin(self, run: RunContext, round_num: int) -> None:
        """Show a round's clients."""
        self.progress.run.begin_round(run.config.sampled)

    def on_client_result(self, run: RunContext, update: Any) -> None:
        """Count a client."""
        stage = self.progress.run.stage
        if stage.name == "clients":
            stage.advance(min(stage.done + 1, stage.total), stage.total)

    def on_progress(self, run: RunContext, stage: str, done: int, total: int) -> None:
        """Show long work of the server."""
        self.on_stage(stage, done, total)

    def on_round_end(self, run: RunContext, record: Record) -> None:
        """Show a finished round."""
        self.progress.run.end_round(record)

    def on_run_end(self, run: RunContext, result: Any) -> None:
        """Leave a line for a run that is one of several."""
        spent = time.monotonic() - self.progress.run.began
        self.progress.run_seconds.append(spent)
        if self.progress.total > 1:
            title = f"{self.progress.number}/{self.progress.total} {self.progress.run.title}"
            metric = result.summary["metric"]
            final = format_metric(metric, result.summary[f"final_{metric}"])
            self.view.say(f"{title}: {metric} {final}, {clock(spent)}")


def with_progress(function: Callable[P, R]) -> Callable[P, R]:
    """Show how far `function` is, which takes `progress`.

    Where something is shown already, as on the command line, that goes on. Else there is a bar in a terminal or a
    notebook; where there is neither, lines with `progress=True`, and nothing by default.
    """

    @functools.wraps(function)
    def shown(*args: P.args, **kwargs: P.kwargs) -> R:
        wanted = kwargs.get("progress")
        with ExitStack() as stack:
            if wanted is False:
                stack.enter_context(stages.showing(stages.Silent()))
            elif stages.current() is None and (bar := default_bar(always=wanted is True)) is not None:
                stack.enter_context(bar)
            return function(*args, **kwargs)

    return shown


def default_bar(*, always: bool = False) -> ProgressBar | None:
    """A bar for where we are; None if nobody would see it, unless `always`."""
    from dynafed.notebook import NotebookView, in_notebook

    console = Console(stderr=True)
    if in_notebook():
        return ProgressBar("", console, NotebookView())
    return ProgressBar("", console) if console.is_terminal or always else None


_shown: list[ProgressBar] = []
"""Bars whose thread ends before a fork and starts again after it, in the parent only: in the child, a lock that the
thread held would stay locked for ever."""


@contextmanager
def _paused_during_forks(bar: ProgressBar) -> Iterator[None]:
    _shown.append(bar)
    try:
        yield
    finally:
        if bar in _shown:
            _shown.remove(bar)


def _pause_all() -> None:
    for bar in _shown:
        bar.pause()


def _resume_all() -> None:
    for bar in _shown:
        bar.resume()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pause_all, after_in_parent=_resume_all, after_in_child=_shown.clear)

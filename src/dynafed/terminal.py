"""The progress bar of the command line."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dynafed.callbacks import Callback, Record, RunContext


def percent(share: float) -> str:
    """A share as people read it."""
    return f"{100 * share:.2f} %"


class ProgressBar(Callback):
    """The bar of one or several runs, one after the other; nothing where the console isn't a terminal."""

    def __init__(self, title: str, console: Console) -> None:
        self.title = title
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("round {task.completed}/{task.total}"),
            TextColumn("{task.fields[accuracy]}"),
            TextColumn("{task.fields[pace]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task: Any = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def titled(self, title: str) -> list[Callback]:
        """This bar, for the next run."""
        self.title = title
        return [self]

    def on_run_begin(self, run: RunContext) -> None:
        """Begin a run's bar. The worker processes are forked before, because the bar has a thread of its own."""
        from dynafed.attacks import attack_settings

        if self.task is not None:
            self.bar.remove_task(self.task)
        self.bar.start()
        title = f"{self.title}, attacked" if attack_settings(run.config) else self.title
        self.task = self.bar.add_task(title, total=run.config.rounds, completed=run.round, accuracy="", pace="starting")

    def on_progress(self, run: RunContext, stage: str, done: int, total: int) -> None:
        """Show long work of the server in the round's place."""
        self.bar.update(self.task, pace=f"{stage} {done}/{total}")

    def on_round_end(self, run: RunContext, record: Record) -> None:
        """Show a finished round."""
        fields: dict[str, Any] = {"pace": f"{record['seconds']:.2f} s a round"}
        if "accuracy" in record:
            fields["accuracy"] = f"accuracy {percent(record['accuracy'])}"
        self.bar.update(self.task, completed=record["round"], **fields)

    def on_run_end(self, run: RunContext, result: Any) -> None:
        """Stop the bar, and its thread, before another run forks workers."""
        self.bar.stop()

    def on_failure(self, run: RunContext, error: BaseException) -> None:
        """Stop the bar."""
        self.bar.stop()

"""What follows a run: each callback is told of its beginning and end, its rounds, clients, checkpoints and failures.

    class Print(dynafed.Callback):
        def on_round_end(self, run, record):
            print(record["round"], record.get("accuracy"))

    dynafed.run(config, callbacks=[Print()])

A callback can end the run with `run.stop(reason)`. One that raises ends it, too, after the checkpoint is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dynafed import stages
from dynafed.errors import UserError
from dynafed.registry import Registry, required_arguments
from dynafed.settings import setting

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.engine.result import Result
    from dynafed.messages import Update
    from dynafed.tree import Tree

Record = dict[str, Any]
"""One line of metrics.jsonl."""


@dataclass
class RunContext:
    """The run that a callback follows."""

    path: Path
    """The run's folder."""
    config: Config
    round: int = 0
    """The last round that is done."""
    model: Tree = field(default_factory=dict)
    """The global model after that round, as it is served, by parameter name; not to be changed."""
    history: list[Record] = field(default_factory=list)
    """The records of all rounds so far, those before a resume among them."""
    stopped: str = ""
    """Why a callback ended the run; empty as long as none has."""

    def stop(self, reason: str) -> None:
        """End the run after this round, with its summary and report."""
        self.stopped = self.stopped or reason or "stopped by a callback"


class Callback:
    """Is told how a run proceeds. Every function does nothing unless a subclass overrides it."""

    name: ClassVar[str] = ""
    """The config's section that holds its settings."""
    Settings: ClassVar[type[Any] | None] = None
    """A frozen dataclass of `settings.setting` fields; an instance is passed to the constructor."""

    def on_run_begin(self, run: RunContext) -> None:
        """Called before the first round; after a resume, `run.history` holds the rounds that were done before."""

    def on_round_begin(self, run: RunContext, round_num: int) -> None:
        """Called before a round's clients are sampled."""

    def on_client_result(self, run: RunContext, update: Update) -> None:
        """Called for each update as it arrives, before it is validated."""

    def on_progress(self, run: RunContext, stage: str, done: int, total: int) -> None:
        """Called during long work of the server, such as the stage "synthesis"."""

    def on_round_end(self, run: RunContext, record: Record) -> None:
        """Called after each round with its line of metrics.jsonl."""

    def on_checkpoint(self, run: RunContext, path: Path) -> None:
        """Called after a checkpoint was written to this folder."""

    def on_run_end(self, run: RunContext, result: Result) -> None:
        """Called after the summary and the report were written."""

    def on_failure(self, run: RunContext, error: BaseException) -> None:
        """Called when the run ends early by an error or an interrupt, after the checkpoint was written."""


class RoundFunction(Callback):
    """A plain function as a callback: `f(record)` or `f(run, record)` at the end of each round."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.takes_run = required_arguments(function) > 1

    def on_round_end(self, run: RunContext, record: Record) -> None:
        """Call the function."""
        self.function(*((run, record) if self.takes_run else (record,)))


class MetricsWriter(Callback):
    """Writes metrics.jsonl, a line a round. Every run has it."""

    def on_run_begin(self, run: RunContext) -> None:
        """Write the rounds before a resume again: a line that was cut off by a crash goes."""
        from dynafed.engine.summary import write_metrics

        write_metrics(run.path, run.history)

    def on_round_end(self, run: RunContext, record: Record) -> None:
        """Append a line."""
        from dynafed.engine.files import append_line, to_line

        append_line(run.path / "metrics.jsonl", to_line(record))


@dataclass(frozen=True)
class EarlyStoppingSettings:
    """Section `early-stopping`."""

    target: float = setting(0.0, "end the run when the metric reaches it (0: never)", low=0)
    patience: int = setting(0, "end the run after so many evaluations without a new best (0: never)", low=0)
    metric: str = setting("accuracy", "the key of metrics.jsonl that is watched; the larger, the better")


class EarlyStopping(Callback):
    """Ends a run by target or by patience. A resumed run counts the rounds before."""

    name = "early-stopping"
    Settings = EarlyStoppingSettings

    def __init__(self, settings: EarlyStoppingSettings | None = None, **changes: Any) -> None:
        from dynafed.settings import build, plain

        self.settings = build(EarlyStoppingSettings, plain(settings or EarlyStoppingSettings()) | changes)
        if not (self.settings.target or self.settings.patience):
            raise UserError("early-stopping needs early-stopping.target or early-stopping.patience")

    def on_run_begin(self, run: RunContext) -> None:
        """Look at the rounds before a resume."""
        self.best, self.waited = float("-inf"), 0
        for record in run.history:
            self.on_round_end(run, record)

    def on_round_end(self, run: RunContext, record: Record) -> None:
        """Compare with the best so far."""
        chosen = self.settings
        if (value := record.get(chosen.metric)) is None:
            return
        if value > self.best:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        if chosen.target and value >= chosen.target:
            run.stop(f"{chosen.metric} reached {chosen.target:g} in round {record['round']}")
        elif chosen.patience and self.waited >= chosen.patience:
            run.stop(f"{chosen.metric} didn't rise in {chosen.patience} evaluations, up to round {record['round']}")


LOGGERS = {
    "tensorboard": "dynafed.loggers:TensorBoard",
    "wandb": "dynafed.loggers:WandB",
    "mlflow": "dynafed.loggers:MLflow",
}

CALLBACKS: Registry[Callable[..., Callback]] = Registry(
    "callback",
    {"early-stopping": EarlyStopping, "provenance": "dynafed.provenance:Provenance", **LOGGERS},
    key="callbacks",
)
"""Callbacks that a config can name."""


class CallbackList:
    """Several callbacks, told in turn."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = list(callbacks)

    def tell(self, event: str, run: RunContext, *details: Any) -> None:
        """Call the function `event` of each callback."""
        for callback in self.callbacks:
            getattr(callback, event)(run, *details)

    def tell_failure(self, run: RunContext, error: BaseException) -> None:
        """Call `on_failure` of each callback, also if one of them raises."""
        for callback in self.callbacks:
            try:
                callback.on_failure(run, error)
            except Exception as second:
                error.add_note(f"and {type(callback).__name__}.on_failure raised {type(second).__name__}: {second}")


def make_callbacks(config: Config, given: Sequence[Callback | Callable[..., Any]]) -> CallbackList:
    """The writer of metrics, those that the config names, those that were given, then the bar, if any."""
    made: list[Callback] = [MetricsWriter()]
    for name in config.callbacks:
        kind: Any = CALLBACKS.load(name)
        settings = getattr(kind, "Settings", None)
        callback = kind(config.section(kind.name, settings)) if settings else kind()
        if not isinstance(callback, Callback):
            raise UserError(f"callbacks = '{name}' is not a dynafed.Callback")
        made.append(callback)
    for one in given:
        if isinstance(one, type) or not (isinstance(one, Callback) or callable(one)):
            raise UserError(f"a callback is a dynafed.Callback or a function of a round's record, not {one!r}")
        made.append(one if isinstance(one, Callback) else RoundFunction(one))
    bar = stages.current()
    if isinstance(bar, Callback) and bar not in made:
        made.append(bar)
    return CallbackList(made)

"""What several commands share: consoles, arguments, tables.

What a command needs is imported when it runs: `dynafed --help` shouldn't wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.table import Table

from dynafed.errors import UserError, printable

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.terminal import ProgressBar

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What commands are added to."""

MOST_CHARACTERS = 2000
"""Of a cell, or of an error: what a file says may be long."""

out, err = (Console(stderr=to_err, soft_wrap=True, emoji=False, markup=False) for to_err in (False, True))


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at that moment: while a progress bar is shown, that prints above it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def log_to_stderr(level: int) -> None:
    """Print our own messages of this level. Other packages' are theirs: some print what they pass on, too."""
    logger = logging.getLogger("dynafed")
    logger.setLevel(level)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())


def raise_on_interrupt(before: Any = signal.SIG_DFL) -> None:
    """From now on, Ctrl-C raises KeyboardInterrupt. Before, it ended the process: see `dynafed.__main__`."""
    if signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def progress_bar(title: str = "") -> Iterator[ProgressBar]:
    """A progress bar, shown at once; what takes seconds to import is imported under it."""
    from dynafed.terminal import ProgressBar

    bar = ProgressBar(title, err)

    def end_at_once(*_: object) -> None:
        try:
            bar.abandon()
        finally:
            os.write(2, b"dynafed: interrupted\n")  # print isn't safe here
            os._exit(130)

    # Inside of an import, a KeyboardInterrupt may come out as any other error, or as none.
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, end_at_once)
    bar.on_stage("loading torch", 0, 0)
    with bar:
        importlib.import_module("dynafed.engine.compare")
        raise_on_interrupt(end_at_once)
        yield bar


def add_command(
    commands: Commands, name: str, command: Callable[[argparse.Namespace], None], about: str
) -> argparse.ArgumentParser:
    """A new command, whose arguments are then added to what is returned."""
    added = commands.add_parser(name, help=about, description=about)
    added.set_defaults(command=command)
    return added


def add_override_argument(to: argparse.ArgumentParser, about: str) -> None:
    """`-s KEY=VALUE`, as often as one likes."""
    to.add_argument("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help=about)


def add_trust_argument(to: argparse.ArgumentParser) -> None:
    """`--trust`, for a folder that may come from somebody else."""
    to.add_argument("--trust", action="store_true", help="import and run what its config names as package.module:Name")


def add_config_arguments(to: argparse.ArgumentParser) -> None:
    """Which config, with what changed, and where the files go; read by `load_config`."""
    to.add_argument("source", nargs="?", metavar="PRESET|FILE.toml", help="default: demo")
    add_override_argument(to, "change a key, such as alpha=0.01")
    to.add_argument("--out", metavar="DIR", help="where the files go (default: a new folder in runs/)")


def add_execution_arguments(to: argparse.ArgumentParser) -> None:
    """How it is executed and printed; read by `execution_overrides`."""
    to.add_argument("--data-dir", metavar="DIR", help="where the datasets are (default: $DYNAFED_DATA)")
    to.add_argument("--engine", metavar="NAME", help="what trains the clients (default: local, processes of our own)")
    to.add_argument("--workers", type=int, metavar="N", help="processes; any number gives the same result")
    to.add_argument(
        "--log", action="append", default=[], metavar="NAME", help="log to tensorboard, wandb or mlflow, too"
    )
    to.add_argument("--json", action="store_true", help="print one JSON object, the summary, and nothing else")
    to.add_argument("-v", "--verbose", action="store_true", help="say what was chosen")


def load_config(args: argparse.Namespace) -> Config:
    """The config that the arguments name, with their changes."""
    from dynafed.config import Config, parse_override

    changes = dict(parse_override(text) for text in args.set) | execution_overrides(args)
    config = Config.load(args.source or "demo", changes)
    return config.replace(callbacks=with_loggers(config, args.log)) if args.log else config


def with_loggers(config: Config, names: Sequence[str]) -> list[str]:
    """The config's callbacks and those that `--log` names."""
    return list(dict.fromkeys([*config.callbacks, *names]))


def execution_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """The config keys that `--engine`, `--workers` and `--data-dir` set."""
    changes: dict[str, Any] = {}
    for key in ("engine", "workers"):
        if getattr(args, key) is not None:
            changes[key] = getattr(args, key)
    if args.data_dir is not None:
        changes["data_dir"] = str(Path(args.data_dir).absolute())
    return changes


def parse_seeds(text: str) -> list[int]:
    """The value of `--seeds`."""
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds {text}: expected whole numbers such as 0,1,2") from None


def print_rows(rows: Any, as_json: bool, columns: Sequence[str] = ()) -> None:
    """Print rows, which are dicts, as a table or as one JSON object."""
    if as_json:
        print(json.dumps({"items": rows} if isinstance(rows, list) else rows))
        return
    columns = columns or list(rows[0])
    table = Table()
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0])
    for row in rows:
        table.add_row(
            *("" if row[column] is None else printable(str(row[column]), MOST_CHARACTERS) for column in columns)
        )
    out.print(table)

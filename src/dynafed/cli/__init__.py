"""The command line: parse, call, print. One module for each group of commands."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from dynafed.cli import (
    audit,
    completion,
    config,
    data,
    listings,
    predict,
    report,
    reproduce,
    runs,
    suggest,
    synthesize,
    train,
    verify,
    watch,
)
from dynafed.cli.common import MOST_CHARACTERS, log_to_stderr
from dynafed.errors import RunFailed, UserError, printable

GROUPS = (
    *(train, predict, synthesize, report, audit, runs, verify, watch, reproduce, suggest),
    *(config, listings, data, completion),
)
"""Modules with a function `register(commands)`, which adds their commands; in the order of `dynafed --help`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 2 the user's mistake, 130 interrupted."""
    args = make_parser().parse_args(arguments)
    log_to_stderr(logging.INFO if getattr(args, "verbose", False) else logging.WARNING)
    try:
        args.command(args)
    except UserError as error:
        print(f"dynafed: {printable(str(error), MOST_CHARACTERS)}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"dynafed: {printable(str(error), MOST_CHARACTERS)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stopped:
        print(f"dynafed: {stopped.args[0] if stopped.args else 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="dynafed", description="Federated learning on clients that are nothing alike."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in GROUPS:
        group.register(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from dynafed.version import __version__

        print(f"dynafed {__version__}")
        parser.exit()

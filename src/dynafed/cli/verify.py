"""`dynafed verify`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dynafed.cli.common import Commands, add_command, print_rows
from dynafed.errors import UserError


def register(commands: Commands) -> None:
    """Add the command."""
    checked = add_command(commands, "verify", _verify, "Say whether a run's folder is as it was written (exit code 0).")
    checked.add_argument("path", metavar="DIR", type=Path)
    checked.add_argument("--json", action="store_true")


def _verify(args: argparse.Namespace) -> None:
    from dynafed.engine.verify import find_changes

    found = find_changes(args.path)
    if args.json:
        print_rows({"path": str(args.path), "whole": not found, "changes": found}, True)
    elif not found:
        print(f"{args.path} is whole")
    else:
        print("\n".join(found))
    if found:
        raise UserError(f"{args.path} is not as it was written ({len(found)} found)")

"""`dynafed report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dynafed.cli.common import Commands, add_command


def register(commands: Commands) -> None:
    """Add the command."""
    page = add_command(commands, "report", _report, "Make the page of one or several runs.")
    page.add_argument("paths", nargs="+", metavar="DIR", type=Path)
    page.add_argument(
        "-o",
        dest="file",
        metavar="FILE",
        type=Path,
        help="default: report.html in the folder, or here if there are several",
    )


def _report(args: argparse.Namespace) -> None:
    from dynafed.report import write_report

    print(write_report(args.paths, args.file))

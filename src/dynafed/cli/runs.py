"""`dynafed runs`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dynafed.cli.common import Commands, add_command, out


def register(commands: Commands) -> None:
    """Add the command."""
    runs = add_command(commands, "runs", _runs, "List the runs in a folder: filter, sort, write an index page.")
    runs.add_argument("paths", nargs="*", metavar="DIR", type=Path, help="folders of runs (default: runs)")
    runs.add_argument(
        "--where", action="append", default=[], metavar="KEY=VALUE", help="such as alpha<0.1 or method=*dynafed*"
    )
    runs.add_argument("--sort", default="", metavar="KEY", help="such as accuracy, seconds, changed, alpha")
    runs.add_argument("-r", "--reverse", action="store_true", help="the largest first")
    runs.add_argument(
        "--columns", default="", metavar="KEY,...", help="show these, too: config keys, best, seconds, ..."
    )
    runs.add_argument("--page", nargs="?", const=True, metavar="FILE", help="write an index (default: DIR/index.html)")
    runs.add_argument("--json", action="store_true")


def _runs(args: argparse.Namespace) -> None:
    from dynafed.runs import columns, list_runs, text

    paths = args.paths or [Path("runs")]
    rows = list_runs(paths, args.where, args.sort, args.reverse)
    shown = columns(rows, filter(None, (args.sort, *args.columns.split(","))))
    page = None
    if args.page:
        from dynafed.report.index import write_index

        page = write_index(rows, shown, paths[0] / "index.html" if args.page is True else Path(args.page))
    if args.json:
        print(json.dumps({"items": rows} | ({"page": str(page)} if page else {})))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in shown:
        table.add_column(
            column, no_wrap=column != "run", overflow="fold", justify="left" if column == "run" else "right"
        )
    for row in rows:
        table.add_row(*(text(row, column) for column in shown))
    out.print(table if rows else "no run meets this")
    if page:
        out.print(f"page: {page}", highlight=False)

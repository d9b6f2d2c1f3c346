"""`dynafed runs`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dynafed.cli.common import Commands, add_command, out

SHORTEST = 16
"""So many characters at least for a run's folder, which is folded if it is longer."""


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


def _too_wide(cells: dict[str, list[str]], width: int, optional: list[str]) -> list[str]:
    """Take columns out of `cells`, the last of `optional` first, until the others fit; returns those taken out."""
    left_out: list[str] = []
    for column in reversed([name for name in cells if name in optional]):
        need = sum(3 + max(map(len, (name, *found))) for name, found in cells.items() if name != "run")
        if need + min(SHORTEST, max(map(len, cells["run"]), default=0)) <= width:
            break
        del cells[column]
        left_out.insert(0, column)
    return left_out


def _runs(args: argparse.Namespace) -> None:
    from dynafed.runs import SETTINGS, columns, list_runs, text

    paths = args.paths or [Path("runs")]
    rows = list_runs(paths, args.where, args.sort, args.reverse)
    asked = [column for column in (args.sort, *args.columns.split(",")) if column]
    shown = columns(rows, asked)
    page = None
    if args.page:
        from dynafed.report.index import write_index

        page = write_index(rows, shown, paths[0] / "index.html" if args.page is True else Path(args.page))
    if args.json:
        print(json.dumps({"items": rows} | ({"page": str(page)} if page else {})))
        return
    cells = {column: [text(row, column) for row in rows] for column in shown}
    left_out = _too_wide(cells, out.width, [column for column in SETTINGS if column not in asked])
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in cells:
        is_run = column == "run"
        table.add_column(column, no_wrap=not is_run, overflow="fold", justify="left" if is_run else "right")
    for values in zip(*cells.values(), strict=True):
        table.add_row(*values)
    out.print(table if rows else "no run meets this")
    if left_out and rows:
        out.print(f"not shown: {', '.join(left_out)} (in a wider window, or with --page or --json)", highlight=False)
    if page:
        out.print(f"page: {page}", highlight=False)

"""`dynafed reproduce`."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dynafed.cli.common import (
    Commands,
    add_command,
    add_execution_arguments,
    add_override_argument,
    err,
    execution_overrides,
    out,
    parse_seeds,
    print_rows,
    progress_bar,
)
from dynafed.errors import FolderBusy, Interrupted, RunFailed

if TYPE_CHECKING:
    from dynafed.reproduce.cells import PlannedCell
    from dynafed.reproduce.paper import Experiment
    from dynafed.reproduce.records import Record

LIST = "list"


def register(commands: Commands) -> None:
    """Add the command."""
    again = add_command(
        commands,
        "reproduce",
        _reproduce,
        "Rerun a table or figure of the paper: our numbers beside the paper's. `list` has all, with their cost here.",
    )
    again.add_argument("names", nargs="+", metavar="NAME", help="table1 .. table6, figure-curves, ..., or list")
    again.add_argument("--scale", choices=("smoke", "cpu", "paper"), default="cpu", help="default: cpu")
    again.add_argument("--methods", metavar="A,B+C", help="default: those of the paper")
    again.add_argument("--seeds", default="0", metavar="0,1,2")
    again.add_argument("--only", action="append", default=[], metavar="WORDS", help='such as "CIFAR-10 0.01"')
    add_override_argument(again, "change a key in every cell; the page marks it")
    again.add_argument("--results", action="append", default=[], type=Path, metavar="FILE.jsonl", help="cells that ran")
    again.add_argument("--dry-run", action="store_true", help="show the cells, their folders and commands; run nothing")
    again.add_argument(
        "--collect", action="store_true", help="make the files from the runs that are there; run nothing"
    )
    again.add_argument("--out", default="runs/reproduce", metavar="DIR", help="default: runs/reproduce")
    add_execution_arguments(again)


def _reproduce(args: argparse.Namespace) -> None:
    if LIST in args.names:
        _list(args)
        return
    with progress_bar("reproduce"):
        from dynafed.config import parse_override
        from dynafed.reproduce.cells import plan
        from dynafed.reproduce.paper import get_experiment
        from dynafed.reproduce.records import read_records

        overrides = dict(parse_override(text) for text in args.set)
        chosen: dict[str, Any] = {
            "scale": args.scale,
            "methods": args.methods.split(",") if args.methods else (),
            "seeds": parse_seeds(args.seeds),
            "only": args.only,
            "overrides": overrides,
            "execution": execution_overrides(args) | ({"callbacks": args.log} if args.log else {}),
        }
        wanted = [get_experiment(name) for name in dict.fromkeys(args.names)]
        planned = {one.name: plan(one, Path(args.out), **chosen) for one in wanted}
    stored = read_records(args.results)
    if args.dry_run:
        _show_plan([cell for cells in planned.values() for cell in cells], stored, args, overrides)
        return
    _run(wanted, planned, stored, args)


def _run(
    wanted: list[Experiment], planned: dict[str, list[PlannedCell]], stored: dict[str, Record], args: argparse.Namespace
) -> None:
    from dynafed.engine.grid import run_cells
    from dynafed.reproduce.cells import to_run
    from dynafed.reproduce.output import write_outputs

    folder, command = Path(args.out), _command(args)
    left = [one for cells in planned.values() for one in cells if one.digest not in stored]
    cells = [] if args.collect else to_run(left)

    def write() -> list[Record]:
        return [
            record
            for one in wanted
            for record in write_outputs(one, planned[one.name], folder, args.scale, stored, command)
        ]

    write()
    open_ones: dict[str, Exception] = {}
    try:
        with progress_bar("reproduce"):
            for cell, outcome in run_cells(cells, keep_going=True):
                if not isinstance(outcome, dict):
                    open_ones[cell.title] = outcome
                write()
    except Interrupted:
        raise KeyboardInterrupt("interrupted; the same command goes on where it was") from None
    records = write()
    pages = [str(folder / f"{one.name}.html") for one in wanted]
    if args.json:
        keys = ("name", "column", "method", "seed", "state", "accuracy", "mean_accuracy", "rounds_to_target")
        rows = [{key: record[key] for key in keys if key in record} for record in records]
        print(json.dumps({"cells": rows, "path": str(folder), "pages": pages}))
    else:
        for one in wanted:
            _show_results(one, [record for record in records if record["name"] == one.name])
        out.print(f"files: {folder}\npages: {' '.join(pages)}", highlight=False)
    if held := sum(isinstance(error, FolderBusy) for error in open_ones.values()):
        running = "1 cell is" if held == 1 else f"{held} cells are"
        err.print(f"{running} being run by another process: the same command shows what came out once it is done")
    failed = {title: error for title, error in open_ones.items() if not isinstance(error, FolderBusy)}
    if failed:
        title, error = next(iter(failed.items()))
        raise RunFailed(f"{len(failed)} of {len(cells)} cells failed; {title}: {error}")


def _command(args: argparse.Namespace) -> str:
    """What makes the same files; where they go and how it is executed is left out."""
    words = [*args.names, "--scale", args.scale, *(["--methods", args.methods] if args.methods else ())]
    words += ["--seeds", args.seeds]
    for flag, values in (("--only", args.only), ("-s", args.set)):
        words += [word for value in values for word in (flag, value)]
    return shlex.join(["dynafed", "reproduce", *words])


def _show_results(experiment: Experiment, records: list[Record]) -> None:
    from dynafed.reproduce.tables import HEADS, result_table

    table = result_table(experiment, records)
    shown = Table("setting", *HEADS[:5], title=f"{experiment.name}: {experiment.title}")
    for column, rows in table.rows.items():
        for place, row in enumerate(rows):
            texts = [text for text, _ in row.texts(table.counts_rounds)]
            shown.add_row("" if place else column, *texts[:5])
    out.print(shown)


def _show_plan(
    planned: list[PlannedCell], stored: dict[str, Record], args: argparse.Namespace, overrides: dict[str, Any]
) -> None:
    from dynafed.engine.summary import read_summary
    from dynafed.report.text import duration
    from dynafed.reproduce.cost import cell_seconds
    from dynafed.reproduce.scales import cell_command

    rows: list[dict[str, Any]] = []
    for one in planned:
        path, config = one.cell.path, one.cell.config
        done = one.digest in stored or read_summary(path) is not None
        seconds = 0.0 if done or one.missing else cell_seconds(config)
        state = "done" if done else one.missing or "not run"
        command = cell_command(
            one.column.settings, one.method, config.seed, args.scale, overrides | execution_overrides(args), path
        )
        row: dict[str, Any] = {"cell": one.cell.title, "state": state, "seconds": seconds, "folder": str(path)}
        rows.append(row | {"command": command, "digest": one.digest})
    if args.json:
        print_rows(rows, True)
        return
    for row in rows:
        cost = f", about {duration(row['seconds'])}" if row["seconds"] else ""
        out.print(f"{row['cell']}: {row['state']}{cost}\n  {row['command']}", highlight=False)
    total = sum({row["folder"]: row["seconds"] for row in rows}.values())
    out.print(f"{len(rows)} cells, about {duration(total)} in all; nothing was run", highlight=False)


def _list(args: argparse.Namespace) -> None:
    from dynafed.report.text import duration
    from dynafed.reproduce.cells import plan
    from dynafed.reproduce.cost import total_seconds
    from dynafed.reproduce.paper import experiments
    from dynafed.reproduce.scales import SCALES

    rows = []
    for name, one in experiments().items():
        row: dict[str, Any] = {"name": name, "title": one.title}
        for scale in SCALES:
            cells = plan(one, Path(args.out), scale=scale, execution=execution_overrides(args))
            row |= {"cells": len({cell.cell.path for cell in cells}), scale: total_seconds(cells)}
        rows.append(row | {"missing": list(dict.fromkeys(cell.missing for cell in cells if cell.missing))})
    if args.json:
        print_rows(rows, True)
        return
    for row in rows:
        costs = ", ".join(f"{scale} {duration(row[scale])}" for scale in SCALES)
        missing = "".join(f"\n{'':26}{reason}" for reason in row["missing"])
        out.print(f"{row['name']:26}{row['title']}\n{'':26}{row['cells']} cells: {costs}{missing}", highlight=False)
    out.print(
        "Times are of one seed, all cells, on this machine's cores: a rough estimate from some training steps. "
        "Names share cells: what one has run in a folder, another finds there."
    )

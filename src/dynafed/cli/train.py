"""`dynafed run`, `resume` and `compare`."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dynafed.cli.common import (
    Commands,
    add_command,
    add_config_arguments,
    add_execution_arguments,
    add_override_argument,
    add_trust_argument,
    execution_overrides,
    load_config,
    out,
    parse_seeds,
    progress_bar,
    with_loggers,
)
from dynafed.errors import Interrupted

if TYPE_CHECKING:
    from dynafed.engine.result import Result


def register(commands: Commands) -> None:
    """Add the commands."""
    one = add_command(commands, "run", _run, "Run one method.")
    add_config_arguments(one)
    add_execution_arguments(one)
    again = add_command(commands, "resume", _resume, "Continue a run that was stopped.")
    again.add_argument("path", metavar="DIR")
    add_override_argument(again, "more rounds=N, or a key of execution")
    add_trust_argument(again)
    add_execution_arguments(again)
    many = add_command(commands, "compare", _compare, "Run several methods with several seeds; one table, one report.")
    add_config_arguments(many)
    many.add_argument("--methods", required=True, metavar="A,B+C", help="methods, each perhaps a composition")
    many.add_argument("--seeds", default="0", metavar="0,1,2")
    many.add_argument("--vary", action="append", default=[], metavar="KEY=V1,V2", help="also over these values")
    add_execution_arguments(many)


def _run(args: argparse.Namespace) -> None:
    with progress_bar():
        from dynafed.engine.run import run

        result = run(load_config(args), out=args.out)
    _show(result, args.json)


def _resume(args: argparse.Namespace) -> None:
    with progress_bar():
        from dynafed.config import parse_override
        from dynafed.engine.run import resume
        from dynafed.engine.trust import load_run_config

        changes = dict(parse_override(text) for text in args.set) | execution_overrides(args)
        if args.log:
            before = load_run_config(Path(args.path), args.trust)
            changes = {"callbacks": with_loggers(before, args.log)} | changes
        result = resume(args.path, changes=changes, trust=args.trust)
    _show(result, args.json)


def _show(result: Result, as_json: bool) -> None:
    from dynafed.progress import format_metric
    from dynafed.report.clean import flatten
    from dynafed.report.load import describe_attack

    page = result.path / "report.html"
    if as_json:
        print(json.dumps(result.summary | {"path": str(result.path), "report": str(page)}))
        return
    summary = result.summary
    attack = describe_attack(flatten(result.federation.config.to_dict()))
    metric = summary["metric"]
    named, show = "" if metric == "accuracy" else f"{metric} ", partial(format_metric, metric)
    out.print(
        f"{summary['method']} on {summary['dataset']}: {named}{show(summary[f'final_{metric}'])} ± "
        f"{show(summary['final_std'])} over the last rounds, best {show(summary['best'])} in round "
        f"{summary['best_round']}, {summary['seconds']:.1f} s"
        + (f"\nstopped: {summary['stopped']}" if "stopped" in summary else "")
        + (f"\n{attack}" if attack else "")
        + (f"\nprivacy: epsilon {summary['epsilon']:.3g}, delta {summary['delta']:g}" if "epsilon" in summary else "")
        + f"\nfiles:  {result.path}\nreport: {page}",
        highlight=False,
    )


def _compare(args: argparse.Namespace) -> None:
    from dynafed.progress import format_metric

    seeds = parse_seeds(args.seeds)
    folder = Path(args.out or f"runs/compare-{Path(args.source or 'demo').stem}")
    try:
        with progress_bar():
            from dynafed.engine.compare import compare
            from dynafed.report import write_report

            config = load_config(args)
            vary = dict(_varied(text) for text in args.vary)
            done = compare(config, args.methods.split(","), seeds, folder, vary=vary)
            page = write_report([done.path], done.path / "report.html")
    except Interrupted:
        raise KeyboardInterrupt("interrupted; the same command goes on where it was") from None
    if args.json:
        print(json.dumps({"rows": done.rows, "path": str(done.path), "report": str(page)}))
        return
    aimed = ("rounds to target",) if config.target_accuracy else ()
    metric = done.rows[0]["metric"]
    attacked = ("attack",) if done.attacked else ()
    table = Table("method", *vary, *attacked, "seeds", f"final {metric}", "best", *aimed, "seconds")
    for row in done.rows:
        table.add_row(
            row["method"],
            *(str(row[key]) for key in vary),
            *(row.get(key, "") for key in attacked),
            str(len(row["seeds"])),
            format_metric(metric, row[f"final_{metric}"])
            + (f" ± {format_metric(metric, row['std']).removesuffix(' %')}" if len(row["seeds"]) > 1 else ""),
            format_metric(metric, row["best"]),
            *(["-" if row["rounds_to_target"] is None else f"{row['rounds_to_target']:.1f}"] if aimed else []),
            f"{row['seconds']:.1f}",
        )
    out.print(table)
    out.print(f"files:  {done.path}\nreport: {page}", highlight=False)


def _varied(text: str) -> tuple[str, list[Any]]:
    from dynafed.config import parse_override

    key, _, values = text.partition("=")
    return key, [parse_override(f"{key}={value}")[1] for value in values.split(",")]

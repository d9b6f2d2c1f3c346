"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from dynafed.errors import Interrupted, UserError, WorkerDied

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.engine.run import Result
    from dynafed.methods import Method

# What a command needs is imported when it runs: `dynafed --help` shouldn't wait for torch.

out, err = (Console(stderr=to_err, soft_wrap=True, emoji=False, markup=False) for to_err in (False, True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 2 the user's mistake, 130 interrupted."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    args = _parser().parse_args(arguments)
    logging.getLogger("dynafed").setLevel(logging.INFO if getattr(args, "verbose", False) else logging.WARNING)
    try:
        args.command(args)
    except UserError as error:
        print(f"dynafed: {error}", file=sys.stderr)
        return 2
    except WorkerDied as error:
        print(f"dynafed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stopped:
        print(f"dynafed: {stopped.args[0] if stopped.args else 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
    return 0


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from dynafed.version import __version__

        print(f"dynafed {__version__}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynafed", description="Federated learning on clients that are nothing alike."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(to: Any, name: str, command: Any, about: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = to.add_parser(name, help=about, description=about)
        added.set_defaults(command=command)
        return added

    def configured(to: argparse.ArgumentParser) -> None:
        to.add_argument("source", nargs="?", metavar="PRESET|FILE.toml", help="default: demo")
        to.add_argument(
            "-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key, such as alpha=0.01"
        )
        to.add_argument("--out", metavar="DIR", help="where the files go (default: a new folder in runs/)")

    def executed(to: argparse.ArgumentParser) -> None:
        to.add_argument("--data-dir", metavar="DIR", help="where the datasets are (default: $DYNAFED_DATA)")
        to.add_argument(
            "--engine", metavar="NAME", help="what trains the clients (default: local, processes of our own)"
        )
        to.add_argument("--workers", type=int, metavar="N", help="processes; any number gives the same result")
        to.add_argument("--json", action="store_true", help="print one JSON object, the summary, and nothing else")
        to.add_argument("-v", "--verbose", action="store_true", help="say what was chosen")

    one = add(commands, "run", _run, "Run one method.")
    configured(one)
    executed(one)
    again = add(commands, "resume", _resume, "Continue a run that was stopped.")
    again.add_argument("path", metavar="DIR")
    again.add_argument(
        "-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="more rounds=N, or a key of execution"
    )
    executed(again)
    many = add(commands, "compare", _compare, "Run several methods with several seeds; one table, one report.")
    configured(many)
    many.add_argument("--methods", required=True, metavar="A,B+C", help="methods, each perhaps a composition")
    many.add_argument("--seeds", default="0", metavar="0,1,2")
    many.add_argument("--vary", action="append", default=[], metavar="KEY=V1,V2", help="also over these values")
    executed(many)
    alone = add(commands, "synthesize", _synthesize, "Synthesize samples from a folder of checkpoints alone.")
    alone.add_argument("--trajectory", required=True, metavar="DIR", help="safetensors files, oldest first by name")
    alone.add_argument("--model", required=True, metavar="NAME", help="convnet, mlp, ... or package.module:factory")
    alone.add_argument("--shape", required=True, metavar="C,H,W", help="of one sample, such as 1,28,28")
    alone.add_argument("--classes", required=True, type=int, metavar="N")
    alone.add_argument("--out", required=True, metavar="FILE", type=Path, help="synthetic.safetensors")
    alone.add_argument("--seed", type=int, default=0)
    alone.add_argument(
        "-s",
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="such as dynafed.samples=150, mlp.width=64",
    )
    alone.add_argument("--json", action="store_true")
    alone.add_argument("-v", "--verbose", action="store_true")
    page = add(commands, "report", _report, "Make the page of one or several runs.")
    page.add_argument("paths", nargs="+", metavar="DIR", type=Path)
    page.add_argument(
        "-o",
        dest="file",
        metavar="FILE",
        type=Path,
        help="default: report.html in the folder, or here if there are several",
    )
    for name, command, about in (
        ("methods", _methods, "List the methods."),
        ("datasets", _datasets, "List the datasets."),
        ("presets", _presets, "List the presets."),
    ):
        listing = add(commands, name, command, about)
        listing.add_argument("--json", action="store_true")
        if name == "datasets":
            listing.add_argument("--data-dir", default="", metavar="DIR")
    datas = commands.add_parser("data", help="Check or fetch a dataset.").add_subparsers(
        required=True, metavar="COMMAND"
    )
    for name, command, about in (
        ("check", _data_check, "Load a dataset and say what was found."),
        ("fetch", _data_fetch, "Download a dataset's official files."),
    ):
        each = add(datas, name, command, about)
        each.add_argument("name", metavar="NAME")
        each.add_argument("--data-dir", default="", metavar="DIR")
        each.add_argument("--json", action="store_true")
    return parser


def _run(args: argparse.Namespace) -> None:
    from dynafed.engine.run import run
    from dynafed.terminal import ProgressBar

    config = _config(args)
    with ProgressBar(config.method, err) as bar:
        result = run(config, out=args.out, callbacks=[bar])
    _show(result, args.json)


def _resume(args: argparse.Namespace) -> None:
    from dynafed.config import parse_override
    from dynafed.engine.run import resume
    from dynafed.terminal import ProgressBar

    changes = dict(parse_override(text) for text in args.set) | _execution(args)
    with ProgressBar("resume", err) as bar:
        result = resume(args.path, changes=changes, callbacks=[bar])
    _show(result, args.json)


def _show(result: Result, as_json: bool) -> None:
    from dynafed.terminal import percent

    page = result.path / "report.html"
    if as_json:
        print(json.dumps(result.summary | {"path": str(result.path), "report": str(page)}))
        return
    summary = result.summary
    out.print(
        f"{summary['method']} on {summary['dataset']}: {percent(result.final_accuracy)} ± "
        f"{percent(summary['final_std'])} over the last rounds, best {percent(summary['best'])} in round "
        f"{summary['best_round']}, {summary['seconds']:.1f} s"
        + (f"\nstopped: {summary['stopped']}" if "stopped" in summary else "")
        + f"\nfiles:  {result.path}\nreport: {page}",
        highlight=False,
    )


def _compare(args: argparse.Namespace) -> None:
    from dynafed.engine.compare import compare
    from dynafed.report import write_report
    from dynafed.terminal import ProgressBar, percent

    config = _config(args)
    vary = dict(_varied(text) for text in args.vary)
    try:
        seeds = [int(seed) for seed in args.seeds.split(",")]
    except ValueError:
        raise UserError(f"--seeds {args.seeds}: expected whole numbers such as 0,1,2") from None
    folder = Path(args.out or f"runs/compare-{Path(args.source or 'demo').stem}")
    try:
        with ProgressBar("compare", err) as bar:
            done = compare(config, args.methods.split(","), seeds, folder, vary=vary, callbacks=bar.titled)
    except Interrupted:
        raise KeyboardInterrupt("interrupted; the same command goes on where it was") from None
    page = write_report([done.path], done.path / "report.html")
    if args.json:
        print(json.dumps({"rows": done.rows, "path": str(done.path), "report": str(page)}))
        return
    aimed = ("rounds to target",) if config.target_accuracy else ()
    table = Table("method", *vary, "seeds", "final accuracy", "best", *aimed, "seconds")
    for row in done.rows:
        table.add_row(
            row["method"],
            *(str(row[key]) for key in vary),
            str(len(row["seeds"])),
            percent(row["final_accuracy"]) + (f" ± {100 * row['std']:.2f}" if len(row["seeds"]) > 1 else ""),
            percent(row["best"]),
            *(["-" if row["rounds_to_target"] is None else f"{row['rounds_to_target']:.1f}"] if aimed else []),
            f"{row['seconds']:.1f}",
        )
    out.print(table)
    out.print(f"files:  {done.path}\nreport: {page}", highlight=False)


def _synthesize(args: argparse.Namespace) -> None:
    from rich.progress import Progress

    from dynafed import models
    from dynafed.config import Config, parse_override
    from dynafed.engine.stopping import Stopped, StopSignal
    from dynafed.seeds import Seeds
    from dynafed.synthesis import DynaFedSettings, synthesize

    config = Config.load(None, dict(parse_override(text) for text in args.set) | {"model": args.model})
    try:
        shape = tuple(int(side) for side in args.shape.split(","))
    except ValueError:
        raise UserError(f"--shape {args.shape}: expected whole numbers such as 1,28,28") from None
    if min(shape) < 1 or args.classes < 2:
        raise UserError(f"--shape {args.shape} --classes {args.classes}: sides from 1, classes from 2")
    if not args.out.absolute().parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}")
    with Seeds(args.seed).torch_seeded("model"):
        model = models.build(config, shape, args.classes)
    losses: list[float] = []
    with Progress(*Progress.get_default_columns(), "{task.fields[loss]}", console=err, transient=True) as bar:
        task = bar.add_task("synthesis", total=None, loss="")

        def on_iteration(iteration: int, loss: float, x: Any) -> None:
            losses.append(loss)
            bar.update(task, loss=f"matching loss {sum(losses[-20:]) / len(losses[-20:]):.3f}")

        with StopSignal() as stop:
            try:
                made = synthesize(
                    model,
                    args.trajectory,
                    shape,
                    args.classes,
                    config.section("dynafed", DynaFedSettings),
                    args.seed,
                    state_file=args.out.with_name(f".{args.out.name}.work"),
                    check_stop=stop.check,
                    progress=lambda what, done, total: bar.update(task, completed=done, total=total),
                    on_iteration=on_iteration,
                )
            except Stopped:
                raise KeyboardInterrupt("interrupted; the same command goes on from what was saved") from None
    made.save(args.out)
    summary = {"file": str(args.out), "matching_loss": sum(losses[-20:]) / len(losses[-20:]), "inner_lr": made.inner_lr}
    if args.json:
        print(json.dumps(summary))
    else:
        out.print(
            f"{len(made.x)} samples, matching loss {summary['matching_loss']:.3f}, inner rate {made.inner_lr:.3g}\n"
            f"file: {args.out}",
            highlight=False,
        )


def _report(args: argparse.Namespace) -> None:
    from dynafed.report import write_report

    print(write_report(args.paths, args.file))


def _methods(args: argparse.Namespace) -> None:
    from dynafed import settings
    from dynafed.config import Config
    from dynafed.engine.federation import Federation
    from dynafed.engine.traffic import traffic
    from dynafed.methods import METHODS

    def described(name: str, kind: type[Method]) -> dict[str, Any]:
        if not args.json:
            return {"name": name, "summary": kind.summary, "needs": kind.needs}
        # The extra bytes are those of the default config: the MLP on fmnist-mini, 80 clients.
        samples = 100 if kind.needs.server_data else 0
        sent = traffic(Federation.create(Config.load(None, {"method": name, "server_samples": samples})))
        return {
            "name": name,
            "summary": kind.summary,
            "needs": settings.plain(kind.needs),
            "bytes_up": sent.up,
            "bytes_down": sent.down,
            "bytes_once": sent.once,
            "citation": kind.citation,
            "settings": settings.describe(kind.Settings) if kind.Settings else [],
        }

    listed = [described(name, METHODS.load(name)) for name in sorted(METHODS.names())]
    _list(listed, args.json, ("name", "summary", "needs"))
    if not args.json:
        out.print("With --json: citations, settings, and what each method sends beside the model.")


def _datasets(args: argparse.Namespace) -> None:
    from dynafed import data
    from dynafed.config import data_folder

    _list(data.describe(data_folder(args.data_dir)), args.json, ("name", "classes", "shape", "train", "test", "found"))


def _presets(args: argparse.Namespace) -> None:
    from dynafed.config import presets

    _list([{"name": name, "about": about} for name, about in presets().items()], args.json, ("name", "about"))


def _data_check(args: argparse.Namespace) -> None:
    from dynafed import data
    from dynafed.config import data_folder

    found = data.check(args.name, data_folder(args.data_dir))
    _list([{"what": key, "value": value} for key, value in found.items()] if not args.json else found, args.json)


def _data_fetch(args: argparse.Namespace) -> None:
    from rich.progress import Progress

    from dynafed import data
    from dynafed.config import data_folder

    folder = Path(args.data_dir) if args.data_dir else data_folder()
    if folder is None:
        raise UserError("data fetch needs a folder: --data-dir DIR, or the variable DYNAFED_DATA")
    with Progress(console=err, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=done)

        where = data.fetch(args.name, folder, show)
    _list([{"name": args.name, "where": str(where)}], args.json)


def _config(args: argparse.Namespace) -> Config:
    from dynafed.config import Config, parse_override

    changes = dict(parse_override(text) for text in args.set) | _execution(args)
    return Config.load(args.source or "demo", changes)


def _execution(args: argparse.Namespace) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for key in ("engine", "workers"):
        if getattr(args, key) is not None:
            changes[key] = getattr(args, key)
    if args.data_dir is not None:
        changes["data_dir"] = str(Path(args.data_dir).absolute())
    return changes


def _varied(text: str) -> tuple[str, list[Any]]:
    from dynafed.config import parse_override

    key, _, values = text.partition("=")
    return key, [parse_override(f"{key}={value}")[1] for value in values.split(",")]


def _list(rows: Any, as_json: bool, columns: Sequence[str] = ()) -> None:
    if as_json:
        print(json.dumps({"items": rows} if isinstance(rows, list) else rows))
        return
    columns = columns or list(rows[0])
    table = Table()
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0])
    for row in rows:
        table.add_row(*("" if row[column] is None else str(row[column]) for column in columns))
    out.print(table)

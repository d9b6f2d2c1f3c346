"""`dynafed data check` and `dynafed data fetch`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dynafed.cli.common import Commands, add_command, err, print_rows, raise_on_interrupt
from dynafed.errors import UserError


def register(commands: Commands) -> None:
    """Add the commands."""
    datas = commands.add_parser("data", help="Check or fetch a dataset.").add_subparsers(
        required=True, metavar="COMMAND"
    )
    for name, command, about in (
        ("check", _check, "Load a dataset, a config's own data, a file or a folder, and say what was found."),
        ("fetch", _fetch, "Download a dataset's official files."),
    ):
        each = add_command(datas, name, command, about)
        each.add_argument("name", metavar="NAME")
        each.add_argument("--data-dir", default="", metavar="DIR")
        each.add_argument("--json", action="store_true")
        if name == "check":
            each.add_argument(
                *("-s", "--set"), action="append", default=[], metavar="KEY=VALUE", help="such as data.target=outcome"
            )


def _check(args: argparse.Namespace) -> None:
    from dynafed import data
    from dynafed.config import data_folder

    path = Path(args.name)
    if path.suffix == ".toml" or path.exists():
        found = _check_own(args, path)
    else:
        found = data.check(args.name, data_folder(args.data_dir))
    print_rows([{"what": key, "value": value} for key, value in found.items()] if not args.json else found, args.json)


def _check_own(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """What is in the clients' files that a config names, or in a file or folder."""
    from dynafed.config import Config, parse_override
    from dynafed.data.inspect import check_config, check_path

    changes = dict(parse_override(text) for text in args.set) | ({"data_dir": args.data_dir} if args.data_dir else {})
    if path.suffix == ".toml":
        return check_config(Config.load(path, changes))
    return check_path(path, Config.load(None, changes))


def _fetch(args: argparse.Namespace) -> None:
    from rich.progress import Progress

    from dynafed import data
    from dynafed.config import data_folder

    raise_on_interrupt()
    folder = Path(args.data_dir) if args.data_dir else data_folder()
    if folder is None:
        raise UserError("data fetch needs a folder: --data-dir DIR, or the variable DYNAFED_DATA")
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=done)

        where = data.fetch(args.name, folder, show)
    print_rows([{"name": args.name, "where": str(where)}], args.json)

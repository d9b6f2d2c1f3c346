"""`dynafed methods`, `datasets` and `presets`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dynafed.cli.common import Commands, add_command, out, print_rows

if TYPE_CHECKING:
    from dynafed.methods import Method


def register(commands: Commands) -> None:
    """Add the commands."""
    for name, command, about in (
        ("methods", _methods, "List the methods."),
        ("datasets", _datasets, "List the datasets."),
        ("presets", _presets, "List the presets."),
    ):
        listing = add_command(commands, name, command, about)
        listing.add_argument("--json", action="store_true")
        if name == "datasets":
            listing.add_argument("--data-dir", default="", metavar="DIR")


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
    print_rows(listed, args.json, ("name", "summary", "needs"))
    if not args.json:
        out.print("With --json: citations, settings, and what each method sends beside the model.")


def _datasets(args: argparse.Namespace) -> None:
    from dynafed import data
    from dynafed.config import data_folder

    rows = data.describe(data_folder(args.data_dir))
    if not args.json:
        rows = [row | {"found": row["format"] if row["found"] else "no"} for row in rows]
    print_rows(rows, args.json, ("name", "classes", "shape", "train", "test", "found"))


def _presets(args: argparse.Namespace) -> None:
    from dynafed.config import presets

    print_rows([{"name": name, "about": about} for name, about in presets().items()], args.json, ("name", "about"))

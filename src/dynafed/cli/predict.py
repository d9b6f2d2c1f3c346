"""`dynafed predict`."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

from dynafed.cli.common import Commands, add_command, add_trust_argument


def register(commands: Commands) -> None:
    """Add the command."""
    form = add_command(commands, "predict", _predict, "Print what a finished run's model takes a file's samples for.")
    form.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    form.add_argument(
        "file", metavar="FILE", type=Path, help=".csv, .parquet, .npz (array x), or a folder of images by class"
    )
    form.add_argument("-o", dest="out", metavar="CSV", type=Path, help="write a CSV file instead of printing")
    add_trust_argument(form)
    form.add_argument("--json", action="store_true", help="print one JSON object")


def _predict(args: argparse.Namespace) -> None:
    from dynafed.data.files import samples_only
    from dynafed.data.images import read_image_folder
    from dynafed.data.settings import DataSettings
    from dynafed.engine.trust import load_run_config
    from dynafed.predictor import load

    predictor = load(args.run, trust=args.trust)
    columns = load_run_config(args.run, args.trust).section("data", DataSettings).columns
    x = read_image_folder(args.file)[0] if args.file.is_dir() else samples_only(args.file, columns)
    found = predictor.predict(x).tolist()
    if args.json:
        print(json.dumps({"predictions": found}))
        return
    file = args.out.open("w", newline="", encoding="utf-8") if args.out else sys.stdout
    try:
        writer = csv.writer(file, lineterminator="\n")
        width = len(found[0]) if isinstance(found[0], list) else 0
        writer.writerow([f"prediction_{number}" for number in range(width)] or ["prediction"])
        writer.writerows(row if width else [row] for row in found)
    finally:
        if args.out:
            file.close()

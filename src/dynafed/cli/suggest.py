"""`dynafed suggest`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from dynafed.cli.common import Commands, add_command, add_trust_argument, out


def register(commands: Commands) -> None:
    """Add the command."""
    about = "Say what to try next, from the evidence of a finished run of FedAvg."
    suggest = add_command(commands, "suggest", _suggest, about)
    suggest.add_argument("path", metavar="RUN")
    add_trust_argument(suggest)
    suggest.add_argument("--json", action="store_true", help="print one JSON object")


def _suggest(args: argparse.Namespace) -> None:
    from dynafed.suggest import suggest

    seen, found = suggest(args.path, args.trust)
    if args.json:
        print(json.dumps({"evidence": asdict(seen) | {"drift": seen.drift}, "suggestions": [asdict(x) for x in found]}))
        return
    mean = "" if seen.mean_gain is None else f"; the mean of its last models has {100 * seen.mean_gain:+.1f} points"
    lines = [
        f"accuracy  {100 * seen.accuracy:.1f} %, ± {100 * seen.swings:.1f} points from round to round{mean}",
        f"skew      90 % of a client's data are in {seen.classes_per_client:g} classes; {seen.classes_if_even} if even",
        f"drift     a client's own model has {100 * seen.client_accuracy:.1f} %, the average of all "
        f"{100 * seen.average_accuracy:.1f} %",
        f"way       {100 * seen.null_share:.0f} % of it (squared) has no effect on any prediction",
    ]
    out.print("\n".join(lines), highlight=False)
    for number, one in enumerate(found, 1):
        out.print(f"\n{number}. {one.command}\n   {one.because}\n   measured: {one.measured}", highlight=False)
    if not found:
        out.print("\nNothing in this run speaks for another method: FedAvg will do.", highlight=False)

"""`dynafed audit`."""

from __future__ import annotations

import argparse
import json

from dynafed.cli.common import Commands, add_command, add_trust_argument, err, out


def register(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "audit", _audit, "Measure what a run's models and synthetic samples give away.")
    command.add_argument("path", metavar="DIR")
    command.add_argument("--shadows", type=int, default=4, metavar="N", help="shadow runs for the membership test")
    command.add_argument("--canaries", type=int, default=10, metavar="N", help="marked samples in a run of their own")
    add_trust_argument(command)
    command.add_argument("--json", action="store_true")


def _audit(args: argparse.Namespace) -> None:
    from dynafed.audit import audit
    from dynafed.terminal import ProgressBar

    with ProgressBar("audit", err):
        done = audit(args.path, shadows=args.shadows, canaries=args.canaries, trust=args.trust)
    if args.json:
        print(json.dumps(done.numbers))
        return
    for finding in done.findings:
        out.print(f"{finding.title}: {finding.found}", highlight=False, markup=False)
    out.print(f"page: {done.page}", highlight=False, markup=False)

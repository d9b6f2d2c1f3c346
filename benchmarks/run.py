"""Measure dynafed against others on the same work.

    python benchmarks/run.py                                    everything but the slow w3, accuracy and scale
    python benchmarks/run.py w1 s1 --repeats 7
    python benchmarks/run.py w2 --peers fedjax,flower
    python benchmarks/run.py w3 --per-round 4                   an eighth of the round; its table says so
    python benchmarks/run.py w3 --variants-of w2                the whole round; every side as it was fastest on W2
    python benchmarks/run.py accuracy --presets cpu-fmnist-mlp  may be interrupted: it goes on where it was
    python benchmarks/run.py s1 --widths 128                    one width; what was measured of the others stays
    python benchmarks/run.py table                              only RESULTS.md, from what was measured

Each section writes its JSON as soon as it is done, and the table is made anew from all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import accuracy, growth, machine, methods, rounds, scale, startup, synthesis, table
from bench.places import RESULTS, TABLE
from bench.workloads import WORKLOADS, toy

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
SECTIONS = (*WORKLOADS, "methods", "accuracy", "s1", "growth", "scale", "startup")
DEFAULT = tuple(section for section in SECTIONS if section not in ("w3", "accuracy", "scale"))
REPEATS = 5


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=DEFAULT, choices=(*SECTIONS, "table"), metavar="section")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns of each side (default %(default)s)")
    parser.add_argument("--peers", default=",".join(rounds.NAMES), help="which peers, or '' for none (default all)")
    parser.add_argument("--per-round", type=int, help="clients in a round of w1 to w6, to scale it down")
    parser.add_argument("--widths", help="of s1, such as 32,64; those measured before here stay (default all)")
    parser.add_argument(
        "--variants-of", choices=WORKLOADS, help="take each side only in the variant that was fastest in that section"
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="w1 to w6: add the turns to those that were measured before, on the same work",
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="w1 to w6: begin no turn that would end after so many seconds"
    )
    parser.add_argument("--no-plain", dest="plain", action="store_false", help="w1 to w6: no plain loops and no floor")
    parser.add_argument(
        "--presets", default=",".join(accuracy.PRESETS), help="which presets in accuracy (default %(default)s)"
    )
    parser.add_argument("--peer-rounds", type=int, default=0, help="rounds of the peers in accuracy, if not all")
    parser.add_argument("--malloc", action="store_true", help="give all sides glibc's settings against page faults")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to see whether everything runs")
    parser.add_argument("--out", type=Path, help="folder for the results, if not the committed one")
    given = parser.parse_args(arguments)
    peers = tuple(name for name in given.peers.split(",") if name)
    if unknown := set(peers) - set(rounds.NAMES):
        parser.error(f"unknown peers {', '.join(sorted(unknown))}: there are {', '.join(rounds.NAMES)}")
    if given.per_round is not None and given.per_round < 1:
        parser.error("--per-round must be at least 1")
    if given.toy and not given.out:
        parser.error("--toy measures nothing: say with --out where its results go")
    # Whoever ends us ends the sides and removes their data, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = given.out or RESULTS
    results.mkdir(parents=True, exist_ok=True)
    environment = MALLOC if given.malloc else {}
    fastest = set()
    if given.variants_of:
        if not (earlier := results / f"{given.variants_of}.json").exists():
            parser.error(f"--variants-of {given.variants_of}: that section has not been measured yet")
        fastest = {one["side"] for one in json.loads(earlier.read_text())["best"].values()}
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        name: lambda workload=workload: rounds.measure(  # type: ignore[misc]
            toy(workload) if given.toy else replace(workload, per_round=given.per_round or workload.per_round),
            given.repeats,
            peers,
            environment,
            fastest,
            plain=given.plain,
            seconds=given.seconds,
        )
        for name, workload in WORKLOADS.items()
    }
    measures["methods"] = lambda: methods.measure(
        toy(WORKLOADS["w1"]) if given.toy else WORKLOADS["w1"], given.repeats, environment
    )
    small: dict[str, Any] = {"widths": (8,), "images": 8, "steps": 3, "flatness": (2, 4)} if given.toy else {}
    if given.widths:
        small["widths"] = tuple(sorted(map(int, given.widths.split(","))))
        small["flatness"] = synthesis.FLATNESS if synthesis.WIDTHS[0] in small["widths"] else ()
    axes = [growth.Axis(axis.name, axis.values[:2], axis.title) for axis in growth.AXES] if given.toy else growth.AXES
    measures["s1"] = lambda: synthesis.measure(given.repeats, environment, **small)
    measures["growth"] = lambda: growth.measure(given.repeats, environment, axes)
    few = {"clients": 200, "per_round": 10, "rounds": 10} if given.toy else {}
    measures["scale"] = lambda: scale.measure(environment, **few)
    curves = results / "accuracy.json"
    measures["accuracy"] = lambda: accuracy.measure(
        given.presets.split(","),
        peers,
        environment,
        json.loads(curves.read_text()) if curves.exists() else {},
        *((3, 2) if given.toy else (0, given.peer_rounds)),
    )
    measures["startup"] = lambda: startup.measure(given.repeats, environment)
    for section in given.sections:
        if section == "table":
            continue
        print(section, file=sys.stderr, flush=True)
        where, began = machine.describe(), time.perf_counter()
        file = results / f"{section}.json"
        before = json.loads(file.read_text()) if given.add and file.exists() else None
        if before and before["machine"]["cpu"] != where["cpu"]:
            parser.error(f"--add: {file.name} was measured on another machine")
        measured = measures[section]()
        if section in WORKLOADS:
            call = {"load_before": where["load_before"], "date": where["date"], "repeats": measured["repeats"]}
            measured = rounds.together(before, measured) if before else measured
            measured["calls"] = [*(before or {}).get("calls", []), call]
        found = {"section": section, "machine": where, "environment": environment, **measured}
        found |= {"variants_of": given.variants_of} if given.variants_of else {}
        found["took_seconds"] = time.perf_counter() - began
        if section == "s1" and given.widths and file.exists():
            found = synthesis.merged(json.loads(file.read_text()), found)
        file.write_text(json.dumps(found, indent=1) + "\n")
        if section == "growth":
            growth.plot(found, results / "growth.png")
        if section == "accuracy":
            accuracy.plot(found, results / "accuracy.png")
        write_table(results)
    write_table(results)


def write_table(results: Path) -> None:
    """RESULTS.md beside the committed results, or in the folder of others."""
    (TABLE if results == RESULTS else results / TABLE.name).write_text(table.render(results))


if __name__ == "__main__":
    main()

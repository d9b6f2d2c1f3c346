"""RESULTS.md, made from the JSON files alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.workloads import WORKLOADS

TITLES = {
    "w1": "W1: MLP 784-128-128-10, 32 of 80 clients, 750 samples each",
    "w1-own": "W1 with the network as a user brings it, an nn.Sequential",
    "w2": "W2: ConvNet width 64 on 3x32x32, 16 of 40 clients, 128 samples each",
    "w3": "W3: ConvNet width 128 on 3x32x32, 32 of 80 clients, 625 samples each (the paper's CIFAR-10 round)",
    "w4": "W4: a user's own nn.Sequential (convolution, GroupNorm of 4 groups, ReLU, MaxPool; 32, 64, 64 channels) "
    "on 3x32x32, 16 of 40 clients, 500 samples each",
    "w5": "W5: ResNet-8 with GroupNorm, a user's own module, on 3x32x32, 16 of 40 clients, 500 samples each",
    "w6-fedprox": "W6: FedProx on W1's work",
    "w6-scaffold": "W6: SCAFFOLD on W1's work, with plain gradient descent",
    "w6-moon": "W6: MOON on W1's work",
}
NOTES = {
    "w6-scaffold": "All sides renew a client's control variate from its own steps (option II). In pfl 0.6.0 it has the "
    "opposite sign of the paper's, the mean step instead of the mean gradient, so that clients are pushed apart "
    "(with the losses (w - 1)^2 / 2 and (w - 3)^2 / 2, theirs grow from round to round). It is as much work, so it "
    "counts here.",
    "w6-moon": "pfl has no MOON. fluke computes, beside what the method needs, gradients of the two models that it "
    "compares with: its own way to the same loss.",
}
"""What one should know about a peer there."""

WANTED = {"w1": 2, "w4": 2, "w5": 1.3, "w6-fedprox": 3, "w6-scaffold": 3, "w6-moon": 3}
"""How many times faster than the fastest peer, where it isn't 1.5."""


def render(folder: Path) -> str:
    """The whole page; sections that were not measured are left out."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    parts = [
        "# Benchmark results",
        "Made by `make bench` from the JSON files in `results/`; nothing here is typed by hand. All sides of a section "
        "run as processes that take turns, one round each, and a side's figure is the best of its turns. "
        "How it is measured: [README.md](README.md).",
    ]
    for name, title in TITLES.items():
        if name in found:
            parts += [f"## {title}", machine(found[name]), *rounds(name, found[name])]
    for name, title, make in (
        ("methods", "M: a round of each method, in multiples of FedAvg's, on W1's work", methods),
        ("accuracy", "A: seconds to an accuracy", accuracy),
        ("s1", "S1: one synthesis iteration against the unrolled loop", synthesis),
        ("growth", "G: cost against size", growth),
        ("scale", "C: a million clients", scale),
        ("startup", "U: from the command to the first finished round", startup),
    ):
        if name in found:
            parts += [f"## {title}", machine(found[name]), *make(found[name])]
    return "\n\n".join(parts) + "\n"


def machine(found: Mapping[str, Any]) -> str:
    """One line about what it was measured on."""
    where = found["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    there = where.get("cores_there", where["cores"])
    pinned = f" (the only one of {there} that all sides may use)" if where["cores"] < there else ""
    environment = ", ".join(f"{name}={value}" for name, value in found["environment"].items())
    return (
        f"{where['cores']} core{'s' if where['cores'] > 1 else ''}{pinned} of {where['cpu']}, "
        f"{where['memory_gb']} GB, {where['system']}, "
        f"Python {where['python']}, {versions}; load before the start {where['load_before']}; {where['date']}; "
        f"best of {found['repeats']}"
        + (f" in {len(found['calls'])} calls" if len(found.get("calls", ())) > 1 else "")
        + (" (fewer than five: take it as a sketch)" if found["repeats"] < 5 else "")
        + (f"; for all sides: {environment}" if environment else "")
        + "."
    )


def rounds(name: str, found: Mapping[str, Any]) -> Iterable[str]:
    """The table of a workload, and the targets."""
    best, standing = found["best"], found["ratios"]
    sampled, whole = found["workload"]["per_round"], WORKLOADS[name].per_round
    if sampled != whole:
        yield f"Scaled: {sampled} clients a round instead of {whole}, and not every peer need be there."
    if chosen := found.get("variants_of"):
        yield f"Every side in that variant only which was the fastest on {chosen.upper()}."
    if name in NOTES:
        yield NOTES[name]
    reference = best.get("plain loader", {}).get("seconds")
    rows = [
        (
            result["side"],
            number(result["best"]),
            number(result["best"] / reference if reference else None),
            number(result["median"]),
            number(min(result["cpu_seconds"]) if result.get("cpu_seconds") else None),
            number(result["first"]),
            f"{result['cores']:.1f}",
            f"{result['steps_a_client']:g}" + ("" if result["same_work"] else " (not the same work!)"),
            number(result["loss"]),
            ", ".join(f"{package} {value}" for package, value in result["versions"].items()),
        )
        for result in sorted(found["sides"], key=lambda result: float(result["best"]))
    ]
    head = (
        "side",
        "s a round, best",
        "to plain DataLoader",
        "median",
        "CPU s, best",
        "first round",
        "cores used",
        "steps a client",
        "loss",
        "versions",
    )
    yield table(head, rows)
    turns = {result["side"]: len(result["seconds"]) for result in found["sides"]}
    if fewer := [f"{side} ({count})" for side, count in turns.items() if count < found["repeats"]]:
        yield f"With fewer turns: {', '.join(fewer)}."
    if found["absent"]:
        yield "Absent: " + "; ".join(f"{entry['side']} ({entry['reason']})" for entry in found["absent"])
    if standing:
        faster = standing["times_faster_than"]
        yield (
            "We are faster than "
            + ", ".join(
                f"{who} {times:.2f} times" for who, times in sorted(faster.items(), key=lambda entry: -entry[1])
            )
            + (f"; {standing['over_floor']:.2f} times the floor." if standing["over_floor"] else ".")
        )
        if less := standing.get("times_less_cpu_than"):
            shares = sorted(less.items(), key=lambda entry: -entry[1])
            yield "In CPU time, of the same variants: " + ", ".join(f"{who} {times:.2f}" for who, times in shares) + "."
        yield table(("target", "wanted", "measured", ""), targets(name, standing))


def targets(name: str, standing: Mapping[str, Any]) -> list[Sequence[str]]:
    """What we want, and what there is."""
    faster, peer = standing["times_faster_than"], standing["fastest_peer"]
    rows = []
    if name == "w1-own":
        own = standing.get("own_network_times_faster_than", {}).get("plain loader")
        return [target("own nn.Sequential, times faster than the plain DataLoader loop", own, at_least=8)]
    if name == "w1":
        rows.append(target("times faster than the plain DataLoader loop", faster.get("plain loader"), at_least=6))
        rows.append(target("times the floor", standing["over_floor"], at_most=3))
    rows.append(
        target(f"times faster than the fastest peer ({peer})", faster.get(peer), at_least=WANTED.get(name, 1.5))
    )
    return rows


def target(
    what: str, value: float | None, *, at_least: float | None = None, at_most: float | None = None
) -> Sequence[str]:
    """A row of a table of targets."""
    wanted = f"at least {at_least:g}" if at_least is not None else f"at most {at_most:g}"
    if value is None:
        return what, wanted, "-", "not measured"
    reached = value >= at_least if at_least is not None else value <= (at_most or 0)
    return what, wanted, number(value), "reached" if reached else "missed"


def methods(found: Mapping[str, Any]) -> Iterable[str]:
    """A row for each method or optimizer."""
    times = found["times_fedavg"]
    rows = [
        (name, number(result["best"]), number(result["median"]), number(times.get(name)), number(result["loss"]))
        for result in found["sides"]
        for name in [result["variant"]]
    ]
    yield table(("method or optimizer", "s a round, best", "median", "times FedAvg", "loss"), rows)
    goals = [target(f"times FedAvg: {name}", times.get(name), at_most=most) for name, most in found["wanted"].items()]
    yield "Wanted is at most 1.25, or the ratio of the multiplications where that is more."
    yield table(("target", "wanted", "measured", ""), goals)
    if found["absent"]:
        yield "Absent: " + "; ".join(f"{entry['side']} ({entry['reason']})" for entry in found["absent"])


def accuracy(found: Mapping[str, Any]) -> Iterable[str]:
    """A row for each side of each preset, and the picture."""
    yield (
        "From the command to 95 % of what FedAvg has in our run at its end (the mean of its last five rounds; seed 0): "
        "the first round that is there, and the first at which the mean of five rounds is. Every round is evaluated, "
        "on all sides. They run one after the other, once each, on a machine that isn't ours alone: small differences "
        "mean nothing. Ours reads, splits and normalizes the data; the peers get it ready, as arrays, the same split, "
        "network, optimizer and numbers of clients, and draw clients and weights by their own seeds. A peer that was "
        "timed for fewer rounds has our FedAvg's accuracies and its own seconds a round. 'Starts' is how often a run "
        "of ours was started: when it was interrupted, what the new start takes is counted, too."
    )
    rows = []
    for preset, one in found["presets"].items():
        for side in one["sides"]:
            first, lasting = (side[when] or {} for when in ("first", "lasting"))
            rows.append(
                (
                    preset,
                    side["side"] + ("" if side["timed"] >= one["rounds"] else f" ({side['timed']} rounds timed)"),
                    f"{100 * one['target']:.1f} %",
                    *(f"{number(at.get('seconds'))} ({at.get('round', '-')})" for at in (first, lasting)),
                    number(side["drawn_seconds"][-1]),
                    f"{100 * side['final']:.1f} %" if side["timed"] >= one["rounds"] else "-",
                    number(side["seconds"][0]),
                    number(side["a_round"]),
                    str(side.get("starts", 1)),
                )
            )
    head = ("preset", "side", "target", "s to it (round)", "s to it, mean of five (round)", "s for all rounds")
    yield table((*head, "accuracy at the end", "s to the first round", "s a round", "starts"), rows)
    yield "![accuracy against seconds](results/accuracy.png)"


def synthesis(found: Mapping[str, Any]) -> Iterable[str]:
    """Both sides at every width, the flatness, the targets."""
    rows, goals = [], []
    for width in found["widths"]:
        for result in width["sides"]:
            who = result["options"]["side"]
            errors = width["relative_errors"] if who == "ours" else {}
            exact = width["from_float64"].get(who, {})
            rows.append(
                (
                    str(width["width"]),
                    who,
                    number(result["best"]),
                    number(result["peak_mb"]),
                    str(len(result["seconds"])),
                    *(", ".join(f"{name} {error:.1e}" for name, error in one.items()) for one in (errors, exact)),
                )
            )
        rows += [(str(width["width"]), entry["side"], "-", "-", "0", entry["reason"], "") for entry in width["absent"]]
        if width["times_faster"] is not None:
            goals.append(target(f"times faster at width {width['width']}", width["times_faster"], at_least=4))
            goals.append(target(f"of its memory at width {width['width']}", width["share_of_memory"], at_most=1 / 3))
        ours = [result for result in width["sides"] if result["options"]["side"] == "ours"]
        if width["width"] == 128 and ours:
            goals.append(target("seconds at width 128", ours[0]["best"], at_most=20))
            goals.append(target("MB at width 128", ours[0]["peak_mb"], at_most=3072))
    size = f"{found['images']} images 3x32x32, s' = {found['steps']}, {found['threads']} threads"
    yield f"{size}; memory is the peak above that after set-up."
    apart = "relative distance of the gradients from each other", "from the unrolled loop's in float64"
    yield table(("width", "side", "s, best", "peak MB", "turns", *apart), rows)
    flat = found["flatness"]
    if points := flat["points"]:
        grown = points[-1]["peak_mb"] / points[0]["peak_mb"]
        more = f"memory at s' = {points[-1]['steps']} over that at {points[0]['steps']}"
        goals.append(target(more, grown, at_most=1.25))
    yield table(("target", "wanted", "measured", ""), goals)
    yield f"Ours at width {flat['width']} with other numbers of inner steps:"
    yield table(
        ("s'", "s", "s a step", "peak MB"),
        [
            (str(one["steps"]), number(one["seconds"]), number(one["seconds_a_step"]), number(one["peak_mb"]))
            for one in flat["points"]
        ],
    )


def growth(found: Mapping[str, Any]) -> Iterable[str]:
    """A row for each axis, and the picture."""
    rows = []
    for axis in found["axes"]:
        points = axis["points"]
        rows.append(
            (
                axis["title"],
                ", ".join(f"{one['value']:g}" for one in points),
                ", ".join(number(one["seconds"]) for one in points),
                number(axis.get("exponent_seconds")),
                ", ".join(number(one["memory_mb"]) for one in points),
                number(axis.get("exponent_memory")),
                "; ".join(f"{entry['job']}: {entry['reason']}" for entry in axis["absent"]),
            )
        )
    yield "Memory is that of all processes together, data and Python included; shared pages are counted once."
    yield table(("what grows", "values", "s a round", "exponent", "MB", "exponent", "absent"), rows)
    yield "![cost against size](results/growth.png)"


def scale(found: Mapping[str, Any]) -> Iterable[str]:
    """The run in pieces, and the targets."""
    points = found["points"]
    yield (
        f"{found['clients']:,} clients, {found['per_round']:,} a round, {found['rounds']} rounds; "
        "memory of all processes together, what they share counted once."
    )
    yield table(
        ("round", "s a round, median", "MB"),
        [(str(one["round"]), number(one["seconds_a_round"]), number(one["memory_mb"])) for one in points],
    )
    first, last = points[0], points[-1]
    goals = [
        target("seconds to the first round", found["seconds_to_first_round"], at_most=10),
        target("MB, at most", max(one["memory_mb"] for one in points), at_most=3072),
        target("memory at the end over that after a tenth", last["memory_mb"] / first["memory_mb"], at_most=1.1),
        target(
            "a round at the end over one at the start", last["seconds_a_round"] / first["seconds_a_round"], at_most=1.1
        ),
    ]
    yield table(("target", "wanted", "measured", ""), goals)


def startup(found: Mapping[str, Any]) -> Iterable[str]:
    """A row for the target."""
    yield (
        f"`{found['command']}`: {found['best']:.2f} s (median {found['median']:.2f}, the very first time "
        f"{found['first_time']:.2f}), {found['over_import_torch']:.2f} times what `import torch` takes."
    )
    yield table(("target", "wanted", "measured", ""), [target("seconds to the first round", found["best"], at_most=10)])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def number(value: float | None) -> str:
    """Three digits that matter."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"

"""W1 to W6: seconds for a round, ours against everybody's, all on the same work."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.protocol import Workload

from bench.sides import Side, interleave
from bench.workloads import W1_OWN, W6, write_data

CORES = len(os.sched_getaffinity(0))
"""Those that we may use; every side that can use all of them does so in one of its variants."""
MANY = CORES > 1
WARM_UP = {"w3": 1}
"""Rounds that don't count, if not two."""
RECORDED = {"w1": 16, "w1-own": 16, "w4": 18, "w5": 18, **{workload.name: 16 for workload in W6}}
"""The same for ours, where it takes so many until it has seen enough steps of both batch sizes to record them."""


def _threads(name: str, what: str = "", **options: Any) -> list[Side]:
    """A side that is one process: with one thread, and with a thread a core."""
    start = f"{what}, " if what else ""
    return [
        Side(name, f"{start}{count} thread{'s' if count > 1 else ''}", {**options, "threads": count})
        for count in sorted({1, CORES})
    ]


OURS = [Side("ours", "")]
OWN = Side("ours", "own nn.Sequential", {"own": True})
"""The same network, but brought by a user."""
PLAIN = [*_threads("plain", "DataLoader", loop="loader"), *_threads("plain", "careful", loop="careful")]
FLOOR = [
    *([Side("floor", f"{CORES} processes", {"threads": 1, "processes": CORES})] if MANY else []),
    Side("floor", f"{CORES} thread{'s' if MANY else ''}", {"threads": CORES}),
]
PEERS = [
    Side("fedjax", "jit", {"backend": "jit"}),
    *([Side("fedjax", f"pmap over {CORES} devices", {"backend": "pmap"})] if MANY else []),
    Side("fedjax", "jit, latest jax", {"backend": "jit"}, flavour="latest"),
    Side("pfl", "1 process", {"threads": 1}),
    *([Side("pfl", f"{CORES} processes", {"threads": 1, "processes": CORES})] if MANY else []),
    *_threads("fluke"),
    *_threads("fedlab"),
    Side("flower", f"{CORES} actor{'s' if MANY else ''}", {"threads": 1, "actors": CORES}),
]
NAMES = tuple(dict.fromkeys(side.name for side in PEERS))
HAVING = {"fedprox": ("pfl", "fluke"), "scaffold": ("pfl", "fluke"), "moon": ("fluke",)}
"""The peers compared on a method other than FedAvg: those of fluke and pfl that have it."""


def sides_of(workload: Workload, peers: Collection[str]) -> list[Side]:
    """Who takes part."""
    ours, own = [replace(side, warm_up=RECORDED.get(workload.name, 0)) for side in (*OURS, OWN)]
    theirs = [side for side in PEERS if side.name in peers and side.name in HAVING.get(workload.method, NAMES)]
    if workload.method in HAVING:
        return [ours, *theirs]
    return [ours, *([own] if workload.name == W1_OWN.name else []), *PLAIN, *theirs, *FLOOR]


def measure(
    workload: Workload,
    repeats: int,
    peers: tuple[str, ...],
    environment: Mapping[str, str],
    chosen: Collection[str] = (),
    *,
    plain: bool = True,
    seconds: float = math.inf,
) -> dict[str, Any]:
    """Every side's seconds a round, best of `repeats` turns, and what follows from them; if some are chosen by their
    labels, theirs only."""
    sides = sides_of(workload, peers)
    if not plain:
        sides = [side for side in sides if side.name not in ("plain", "floor")]
    if chosen:
        sides = [side for side in sides if side.label in {*chosen, OWN.label}]
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(workload, Path(folder))
        jobs = [(side, workload, data) for side in sides]
        results, absent = interleave(jobs, repeats, environment, warm_up=WARM_UP.get(workload.name, 2), seconds=seconds)
    repeats = min((len(result["seconds"]) for result in results), default=0)
    return summary(workload.to_json() | {"steps_a_client": workload.steps}, repeats, results, absent)


def summary(
    workload: Mapping[str, Any], repeats: int, results: list[dict[str, Any]], absent: list[dict[str, str]]
) -> dict[str, Any]:
    """A section's results."""
    results = [checked(result, workload) for result in results]
    return {
        "workload": workload,
        "repeats": repeats,
        "sides": results,
        "absent": absent,
        "best": (best := best_of_each(results)),
        "ratios": ratios(best),
    }


def together(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Two measurements of the same work as one: every side with the turns of both."""
    found = {result["side"]: result for result in before["sides"]}
    for result in now["sides"]:
        found[result["side"]] = _both(found[result["side"]], result) if result["side"] in found else result
    absent = {entry["side"]: entry for entry in (*before["absent"], *now["absent"]) if entry["side"] not in found}
    return summary(now["workload"], before["repeats"] + now["repeats"], list(found.values()), list(absent.values()))


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    seconds = [*one["seconds"], *other["seconds"]]
    busy = sum(each["cores"] * sum(each["seconds"]) for each in (one, other))
    return {
        **other,
        "best": min(seconds),
        "median": statistics.median(seconds),
        "seconds": seconds,
        "cpu_seconds": [*one.get("cpu_seconds", []), *other["cpu_seconds"]],
        "first": one["first"],
        "cores": busy / sum(seconds),
        "steps": one["steps"] + other["steps"],
        "rounds": one["rounds"] + other["rounds"],
    }


def checked(result: dict[str, Any], workload: Mapping[str, Any]) -> dict[str, Any]:
    """Note whether a side did the work that it was asked to do: every optimizer step, and training that trains."""
    wanted = result["rounds"] * workload["per_round"] * workload["steps_a_client"]
    return result | {
        "steps_a_client": result["steps"] / result["rounds"] / workload["per_round"],
        "same_work": result["steps"] == wanted,
    }


def group_of(result: Mapping[str, Any]) -> str:
    """What is compared: a framework, or one of the two plain loops, or ours with a user's network."""
    if result["options"].get("own"):
        return "own network"
    return f"plain {result['options']['loop']}" if result["name"] == "plain" else str(result["name"])


def best_of_each(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The best that each competitor can do, and with which variant; who did other work is out of competition."""
    best: dict[str, dict[str, Any]] = {}
    for result in results:
        group = group_of(result)
        if result["same_work"] and (group not in best or result["best"] < best[group]["seconds"]):
            best[group] = {"seconds": result["best"], "side": result["side"]}
            best[group] |= {"cpu": min(result["cpu_seconds"])} if result.get("cpu_seconds") else {}
    return best


def ratios(best: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Our standing: how many times faster than each, and how far above the floor."""
    if "ours" not in best:
        return {}
    ours = best["ours"]["seconds"]
    faster = {name: one["seconds"] / ours for name, one in best.items() if name not in ("ours", "own network", "floor")}
    rivals = [name for name in faster if name in NAMES]
    return {
        "times_faster_than": faster,
        "fastest_peer": min(rivals, key=lambda name: faster[name], default=None),
        "over_floor": ours / best["floor"]["seconds"] if "floor" in best else None,
        "times_less_cpu_than": {
            name: best[name]["cpu"] / best["ours"]["cpu"] for name in faster if best[name].get("cpu")
        }
        if best["ours"].get("cpu")
        else {},
        "own_network_times_faster_than": {
            name: best[name]["seconds"] / best["own network"]["seconds"] for name in faster if "own network" in best
        },
    }

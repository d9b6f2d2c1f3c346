"""M: a round of each method and optimizer on W1's work, in multiples of FedAvg's with Adam."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.protocol import Workload

from bench.rounds import RECORDED
from bench.sides import Side, interleave
from bench.workloads import write_data

REFERENCE = "fedavg"
VARIANTS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    **{name: {"optimizer": name} for name in ("sgd", "momentum", "adamw")},
    **{name: {"method": name} for name in ("fedprox", "feddyn", "scaffold", "moon", "fedmix", "fedgen")},
}
"""How each differs from FedAvg with Adam."""
SLACK = 1.25
"""What a method may cost in multiples of FedAvg, if its arithmetic isn't more."""


def arithmetic(workload: Workload) -> dict[str, float]:
    """The multiplications of those methods that have more of them, in multiples of FedAvg's, per sample.

    SCAFFOLD takes a gradient more, MOON two forward passes. FedMix differentiates all layers but the first in a
    direction. FedGen generates features on the clients and trains the generator on the server, with default settings.
    """
    first, hidden = math.prod(workload.shape) * workload.width, workload.width**2
    head = workload.width * workload.classes
    plain = 2 * first + 3 * (hidden + head)
    units, noise, drawn, steps, batch = 256, 32, 32, 50, 128
    generator = units * (noise + workload.classes + workload.width)
    practice = (1 + drawn / workload.batch) * (generator + head) + drawn / workload.batch * head
    trained = 3 * generator + 2 * workload.per_round * head + 2 * batch * workload.width
    server = steps * batch * trained / (workload.per_round * workload.samples)
    more = {"scaffold": plain, "moon": 2 * (first + hidden), "fedmix": 3 * (hidden + head), "fedgen": practice + server}
    return {name: round(1 + each / plain, 2) for name, each in more.items()}


def measure(workload: Workload, repeats: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """Every variant's seconds a round, best of `repeats` turns, and what they are in FedAvg's."""
    sides = [Side("ours", name, {"config": changes}) for name, changes in VARIANTS.items()]
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(workload, Path(folder))
        jobs = [(side, workload, data) for side in sides]
        results, absent = interleave(jobs, repeats, environment, warm_up=RECORDED["w1"])
    best = {result["variant"]: result["best"] for result in results}
    return {
        "workload": workload.to_json(),
        "repeats": repeats,
        "sides": results,
        "absent": absent,
        "wanted": {name: max(SLACK, arithmetic(workload).get(name, 1)) for name in VARIANTS if name != REFERENCE},
        "times_fedavg": {name: seconds / best[REFERENCE] for name, seconds in best.items()}
        if REFERENCE in best
        else {},
    }

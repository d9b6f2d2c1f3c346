"""M: a round of each method and optimizer on W1's work, in multiples of FedAvg's with Adam."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.protocol import Workload

from bench.rounds import WARM_UP
from bench.sides import Side, interleave
from bench.workloads import write_data

REFERENCE = "fedavg"
VARIANTS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    **{name: {"optimizer": name} for name in ("sgd", "momentum", "adamw")},
    **{name: {"method": name} for name in ("fedprox", "feddyn", "scaffold", "moon", "fedmix", "fedgen")},
}
"""How each differs from FedAvg with Adam."""


def measure(workload: Workload, repeats: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """Every variant's seconds a round, best of `repeats` turns, and what they are in FedAvg's."""
    sides = [Side("ours", name, {"config": changes}) for name, changes in VARIANTS.items()]
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(workload, Path(folder))
        jobs = [(side, workload, data) for side in sides]
        results, absent = interleave(jobs, repeats, environment, warm_up=WARM_UP["w1"])
    best = {result["variant"]: result["best"] for result in results}
    return {
        "workload": workload.to_json(),
        "repeats": repeats,
        "sides": results,
        "absent": absent,
        "times_fedavg": {name: seconds / best[REFERENCE] for name, seconds in best.items()}
        if REFERENCE in best
        else {},
    }

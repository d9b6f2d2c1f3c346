"""G: how our cost grows with the size of the job: the slope of a line through the logarithms, and a picture of it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from peers.protocol import Workload

from bench import synthesis
from bench.rounds import OURS
from bench.sides import Side, interleave
from bench.workloads import write_data

BASE = Workload("growth", "mlp", 64, (32,), clients=100, per_round=32, samples=64)
"""Small clients, so that what a round costs beside training can be seen."""


@dataclass(frozen=True)
class Axis:
    """One size that grows while all others stay."""

    name: str
    values: tuple[int, ...]
    title: str


AXES = (
    Axis("clients", (100, 1_000, 10_000, 100_000), "clients in total"),
    Axis("per_round", (8, 32, 128, 512), "clients a round"),
    Axis("samples", (64, 256, 1024, 4096), "samples a client"),
    Axis("width", (16, 32, 64, 128), "width of a ConvNet"),
    Axis("steps", (4, 8, 16, 32, 64), "inner steps s'"),
    Axis("images", (25, 50, 100, 200), "synthetic samples"),
)


def point(axis: Axis, value: int) -> tuple[Side, Workload]:
    """The job at one place on an axis."""
    if axis.name in ("steps", "images"):
        sizes = {"images": 50, "steps": 8} | {axis.name: value}
        return synthesis.side("ours", **sizes), replace(synthesis.job(16), name=f"growth-{axis.name}-{value}")
    base = {
        "clients": replace(BASE, samples=8),
        "per_round": replace(BASE, clients=512),
        "samples": replace(BASE, per_round=8, clients=16),
        "width": Workload("growth", "convnet", 64, (3, 32, 32), clients=8, per_round=4, samples=64),
    }[axis.name]
    return OURS[0], replace(base, name=f"growth-{axis.name}-{value}", **{axis.name: value})


def measure(repeats: int, environment: Mapping[str, str], axes: Sequence[Axis] = AXES) -> dict[str, Any]:
    """Seconds and memory along every axis; the points of an axis take turns."""
    return {"repeats": repeats, "axes": [_along(axis, repeats, environment) for axis in axes]}


def _along(axis: Axis, repeats: int, environment: Mapping[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        sides = []
        for value in axis.values:
            side, job = point(axis, value)
            data = Path(folder) / str(value)
            if side.name == "ours":
                write_data(job, data)
            sides.append((side, job, data))
        results, absent = interleave(sides, repeats, environment, warm_up=1, memory=True)
    found = {result["job"]: result for result in results}
    points = [
        {"value": value, "seconds": found[job.name]["best"], "memory_mb": found[job.name]["family_peak_mb"]}
        for value, (_, job, _) in zip(axis.values, sides, strict=True)
        if job.name in found
    ]
    return {
        "axis": axis.name,
        "title": axis.title,
        "points": points,
        "exponent_seconds": exponent(points, "seconds"),
        "exponent_memory": exponent(points, "memory_mb"),
        "absent": absent,
    }


def exponent(points: Sequence[Mapping[str, float]], what: str) -> float | None:
    """The slope of the straight line through the logarithms: 0 is flat, 1 is proportional."""
    if len(points) < 2:
        return None
    x, y = np.log([[point["value"], point[what]] for point in points]).T
    return float(np.polyfit(x, y, 1)[0])


def plot(found: Mapping[str, Any], file: Path) -> None:
    """Seconds and memory against size, one column for each axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = [axis for axis in found["axes"] if len(axis["points"]) > 1]
    figure, grid = plt.subplots(2, len(axes), figsize=(3 * len(axes), 5.5), squeeze=False, layout="constrained")
    rows = (("seconds", "seconds", "exponent_seconds"), ("memory_mb", "memory, MB", "exponent_memory"))
    for column, axis in enumerate(axes):
        for row, (what, label, slope) in enumerate(rows):
            panel = grid[row][column]
            values = [point["value"] for point in axis["points"]]
            panel.loglog(values, [point[what] for point in axis["points"]], "o-", color="#1f4e79")
            title = f"{axis['title']}\n" if row == 0 else ""
            panel.set_title(f"{title}exponent {axis[slope]:.2f}")
            panel.grid(True, which="both", alpha=0.25)
            if column == 0:
                panel.set_ylabel(label)
    figure.savefig(file, dpi=110)
    plt.close(figure)

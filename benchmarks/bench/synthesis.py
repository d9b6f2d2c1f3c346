"""S1: one synthesis iteration, ours against the unrolled loop: seconds, peak memory, and do the gradients agree."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from peers.protocol import Workload

from bench.rounds import CORES
from bench.sides import Side, interleave
from bench.workloads import W2

IMAGES = 150
STEPS = 20
WIDTHS = (32, 64, 128)
FLATNESS = (4, 20, 64)
LIMIT_GB = 18
"""The unrolled loop passes 10 GB at width 128: it gets this much address space, and this long."""
PATIENCE = 600.0
EXACT = 64
"""The greatest width at which the unrolled loop also runs in float64, to tell how exact the gradients are."""


def side(name: str, *, images: int, steps: int, save: Path | None = None, dtype: str = "float32", **more: Any) -> Side:
    """One of the two ways to the gradient; both with all cores as threads."""
    options = {"side": name, "synthetic": images, "steps": steps, "threads": CORES, "dtype": dtype} | (
        {"save": str(save)} if save else {}
    )
    limit = {"limit_gb": LIMIT_GB} if name == "unrolled" else {}
    return Side("matching", f"{name}, s' = {steps}", options | limit, **more)


def job(width: int) -> Workload:
    """A carrier for the network's shape; there are no clients here."""
    return replace(W2, name=f"s1-{width}", width=width)


def measure(
    repeats: int,
    environment: Mapping[str, str],
    *,
    widths: tuple[int, ...] = WIDTHS,
    images: int = IMAGES,
    steps: int = STEPS,
    flatness: tuple[int, ...] = FLATNESS,
) -> dict[str, Any]:
    """Both sides at every width, and ours at the first with other numbers of inner steps."""
    return {
        "images": images,
        "steps": steps,
        "threads": CORES,
        "repeats": repeats,
        "widths": [_at(width, repeats, environment, images, steps) for width in widths],
        "flatness": _flatness(widths[0], repeats, environment, images, flatness),
    }


def merged(before: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Some widths measured anew among those of an earlier measurement in the same place."""
    same = all(before.get(key) == found[key] for key in ("environment", "images", "steps", "threads", "repeats"))
    if not same or before["machine"]["cpu"] != found["machine"]["cpu"]:
        return dict(found)
    widths = {one["width"]: one for one in (*before["widths"], *found["widths"])}
    flat = found["flatness"] if found["flatness"]["points"] else before["flatness"]
    return {**found, "widths": [widths[width] for width in sorted(widths)], "flatness": flat}


def _flatness(
    width: int, repeats: int, environment: Mapping[str, str], images: int, steps: tuple[int, ...]
) -> dict[str, Any]:
    sides = [(side("ours", images=images, steps=count), job(width), Path()) for count in steps]
    results, absent = interleave(sides, repeats, environment, warm_up=1)
    points = [
        {
            "steps": result["options"]["steps"],
            "seconds": result["best"],
            "seconds_a_step": result["best"] / result["options"]["steps"],
            "peak_mb": result["peak_mb"],
        }
        for result in results
    ]
    return {"width": width, "points": points, "absent": absent}


def _at(width: int, repeats: int, environment: Mapping[str, str], images: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.npz" for name in ("ours", "unrolled", "exact")}
        size: dict[str, Any] = {"images": images, "steps": steps, "timeout": PATIENCE}
        if width <= EXACT:
            exact = side("unrolled", save=files["exact"], dtype="float64", **size)
            interleave([(exact, job(width), Path())], 1, environment, warm_up=1)
        sides = [side(name, save=files[name], **size) for name in ("ours", "unrolled")]
        results, absent = interleave([(one, job(width), Path()) for one in sides], repeats, environment, warm_up=1)
        errors = relative_errors(files["ours"], files["unrolled"])
        from_float64 = {name: relative_errors(files[name], files["exact"]) for name in ("ours", "unrolled")}
    by_name = {result["options"]["side"]: result for result in results}
    ours, theirs = by_name.get("ours"), by_name.get("unrolled")
    return {
        "width": width,
        "sides": results,
        "absent": absent,
        "times_faster": theirs["best"] / ours["best"] if ours and theirs else None,
        "share_of_memory": ours["peak_mb"] / theirs["peak_mb"] if ours and theirs else None,
        "relative_errors": errors,
        "from_float64": from_float64,
    }


def relative_errors(ours: Path, theirs: Path) -> dict[str, float]:
    """How far apart two gradients are, as a share of the second's length; nothing if one isn't there."""
    if not (ours.exists() and theirs.exists()):
        return {}
    with np.load(ours) as a, np.load(theirs) as b:
        return {name: float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in b.files}

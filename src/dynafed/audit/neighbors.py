"""Are synthetic samples nearer to training samples than to others that the training never saw?"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dynafed.audit.finding import Finding
from dynafed.audit.statistics import Array, Estimate, mean_with_interval, p_value
from dynafed.audit.subject import Subject

CANDIDATES = 300
"""Of each class, on either side, at most."""
PERMUTATIONS = 400
SHOWN = 6


@dataclass(frozen=True)
class Nearness:
    """How near samples are to members and to non-members of the same classes, as many of each."""

    to_members: Array
    to_others: Array
    nearest: list[tuple[int, Tensor]]
    """For each sample its number and the nearest member."""
    p: float
    difference: Estimate
    """Distance to the nearest non-member less that to the nearest member, by their mean."""


def nearness(
    x: Tensor, labels: Tensor, members: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], rng: np.random.Generator
) -> Nearness | None:
    """Compare by the Euclidean distance; the p-value is that of shuffling who is a member, class by class.

    Samples that aren't finite are left out.
    """
    finite = x.flatten(1).isfinite().all(1)
    columns: list[tuple[list[int], Array, Tensor]] = []
    for label in sorted(set(labels.tolist())):
        mine = [int(number) for number in torch.nonzero((labels == label) & finite).flatten()]
        inside, outside = (side[0][side[1] == label] for side in (members, others))
        count = min(len(inside), len(outside), CANDIDATES)
        if count < 2 or not mine:
            continue
        inside, outside = (side[torch.from_numpy(rng.permutation(len(side))[:count])] for side in (inside, outside))
        pool = torch.cat([inside, outside]).flatten(1)
        columns.append((mine, torch.cdist(x[mine].flatten(1), pool).double().numpy(), inside))
    if not columns:
        return None

    def gaps(shuffle: bool) -> tuple[Array, Array]:
        near, far = [], []
        for _, distances, _ in columns:
            order = rng.permutation(distances.shape[1]) if shuffle else np.arange(distances.shape[1])
            half = len(order) // 2
            near.append(distances[:, order[:half]].min(1))
            far.append(distances[:, order[half:]].min(1))
        return np.concatenate(near), np.concatenate(far)

    def excess(pair: tuple[Array, Array]) -> float:
        return float((pair[1] - pair[0]).mean())

    observed = gaps(shuffle=False)
    permuted = [excess(gaps(shuffle=True)) for _ in range(PERMUTATIONS)]
    scale = float(np.concatenate(observed).mean())
    nearest = [
        (number, inside[int(row[: len(inside)].argmin())])
        for mine, distances, inside in columns
        for number, row in zip(mine, distances, strict=True)
    ]
    difference = mean_with_interval((observed[1] - observed[0]) / scale, rng)
    return Nearness(observed[0], observed[1], nearest, p_value(excess(observed), permuted), difference)


def check_neighbors(subject: Subject) -> Finding:
    """Each synthetic sample's distance to training samples against held-out ones of its class."""
    tested = (
        "For each synthetic sample, the distance to the nearest training sample of its class, and to the nearest of as "
        "many held-out samples, which no client ever had. If samples were copied, they would be nearer to the former."
    )
    not_proved = (
        "A synthetic sample may tell about its class, or about many samples together, without being near to any one of "
        "them. Distances of pixels are a crude measure."
    )
    if subject.synthetic is None:
        return Finding("Nearest neighbors", tested, "The run has no synthetic samples.", not_proved, None)
    rng = subject.seeds.rng("audit", "neighbors")
    x, labels = subject.synthetic.x, subject.synthetic.labels.argmax(1)
    members = subject.training(subject.members(len(subject.split.partition.indices), "neighbors"))
    result = nearness(x, labels, members, subject.held_out(), rng)
    if result is None:
        return Finding("Nearest neighbors", tested, "There are too few held-out samples.", not_proved, None)
    leaks = result.p < 0.05
    share = float((result.to_members < result.to_others).mean())
    found = (
        f"{100 * share:.0f} % of the samples are nearer to a training sample than to a held-out one; chance is 50 %. "
        f"The mean difference is {100 * result.difference.value:.2f} % of the distance "
        f"[{100 * result.difference.low:.2f}, {100 * result.difference.high:.2f}], p = {result.p:.3f}. "
        + ("Training samples are nearer than chance allows." if leaks else "That is what chance gives.")
    )
    order = np.argsort(result.to_members / result.to_others)[:SHOWN]
    pictures = [
        {"src": to_png(image), "caption": caption}
        for number in order
        for image, caption in (
            (x[result.nearest[number][0]], f"synthetic {result.nearest[number][0]}"),
            (result.nearest[number][1], "nearest training sample"),
        )
    ]
    blocks = [histogram("Distance to the nearest", {"training": result.to_members, "held-out": result.to_others})]
    if x.ndim == 4:
        text = "The synthetic samples that are nearest to a training sample, each with that sample."
        blocks.append({"text": text, "kind": "images", "data": {"images": pictures, "pixelated": True, "small": True}})
    numbers = {"p": result.p, "difference": result.difference.plain(), "nearer_to_training": share}
    return Finding("Nearest neighbors", tested, found, not_proved, leaks, numbers, blocks)


def histogram(title: str, groups: dict[str, Array], bins: int = 12) -> dict[str, Any]:
    """Bars of the share of values in each bin."""
    edges = np.histogram_bin_edges(np.concatenate(list(groups.values())), bins)
    series = {name: (np.histogram(values, edges)[0] / len(values)).tolist() for name, values in groups.items()}
    labels = [f"{low:.3g}" for low in edges[:-1]]
    return {"title": title, "kind": "bars", "data": {"labels": labels, "series": series, "format": "percent"}}


def to_png(x: Tensor) -> str:
    """A sample as a picture, from its smallest value to its largest."""
    low, high = float(x.min()), float(x.max())
    values = ((x - low) / max(high - low, 1e-9) * 255).round().to(torch.uint8).cpu().numpy()
    image = Image.fromarray(values[0] if len(values) == 1 else np.moveaxis(values[:3], 0, -1))
    stream = io.BytesIO()
    image.save(stream, "png")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"

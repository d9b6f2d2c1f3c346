"""Log of a synthesis and its figures for the report: loss curve, samples with their labels, quality measures."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from dynafed.engine.files import SAMPLES, SAMPLES_NOW, append_line, to_line, write_bytes
from dynafed.synthesis.synthetic import SyntheticData

if TYPE_CHECKING:
    from dynafed.synthesis.quality import Quality

SNAPSHOTS = (0, 125, 250, 500)
"""Iterations whose samples are shown, as in the paper; the last iteration is added."""
SHOWN = 30
"""The largest number of samples in a figure."""
UPDATES = 50
"""How often in a synthesis its picture of now is written."""


class SynthesisFigures:
    """Writes synthesis.jsonl and snapshots of the samples while a synthesis runs, and report.json at its end."""

    def __init__(self, folder: Path, iterations: int) -> None:
        self.folder = folder
        self.snapshots = {number for number in SNAPSHOTS if number < iterations} | {iterations}
        self.update_every = max(1, iterations // UPDATES)
        self.log_file = folder / "synthesis.jsonl"
        self.losses: dict[int, float] = {}
        # A resumed synthesis continues the log of the interrupted one.
        for line in self.log_file.read_bytes().splitlines() if self.log_file.exists() else ():
            with suppress(ValueError, AttributeError):  # a line that was cut off by a crash
                self.losses |= {int(number): loss for number, loss in json.loads(line).items()}

    def on_iteration(self, iteration: int, loss: float, x: Tensor) -> None:
        """Log an iteration's loss, and write the samples as an image if it is one of the snapshots."""
        self.losses[iteration] = loss
        append_line(self.log_file, to_line({iteration: loss}))
        if iteration in self.snapshots and x.ndim == 4:
            write_png(self.folder / f"synthetic-{iteration:06d}.png", x[:SHOWN], columns=10)
        if iteration % self.update_every == 0 and x.ndim == 4:
            write_png(self.folder / SAMPLES_NOW, x[:SHOWN], columns=10)

    def finish(
        self, synthetic: SyntheticData, quality: Quality | None, shares: Mapping[str, float], names: Sequence[str]
    ) -> None:
        """Write synthetic.png and report.json.

        `shares` are those of the squared way along the network's invariances, by tensor; `names` are the parameters'.
        """
        blocks = [
            *self._loss_curve(),
            *self._tensors(synthetic, shares, names),
            *self._samples(synthetic),
            *(self._evidence(quality) if quality else ()),
        ]
        (self.folder / SAMPLES_NOW).unlink(missing_ok=True)
        write_bytes(self.folder / "report.json", to_line(blocks).encode())

    def _loss_curve(self) -> list[dict[str, Any]]:
        numbers = sorted(number for number in self.losses if number)
        return [
            {
                "title": "Synthesis: the matching loss",
                "text": "Squared distance from where the inner steps lead to the target, over that from the segment's "
                "start to the target: 1 is standing still. Each iteration draws another segment.",
                "kind": "lines",
                "data": {
                    "x": numbers,
                    "series": {"matching loss": [self.losses[number] for number in numbers]},
                    "xlabel": "iteration",
                    "ylabel": "matching loss",
                },
            }
        ]

    def _tensors(
        self, synthetic: SyntheticData, shares: Mapping[str, float], names: Sequence[str]
    ) -> list[dict[str, Any]]:
        rates = [] if synthetic.inner_rates is None else synthetic.inner_rates.tolist()
        rate_of = dict(zip(names, rates, strict=False))
        rows = [
            [name, f"{shares.get(name, 0.0):.2%}", f"{rate_of.get(name, synthetic.inner_lr):.3g}"]
            for name in names
            if name in rate_of or name in shares
        ]
        rows.append(["all", f"{sum(shares.values()):.2%}", f"{synthetic.inner_lr:.3g}"])
        return [
            {
                "title": "Directions without an effect, and inner rates",
                "text": "The share of the squared way from a segment's start to its end in directions that predictions "
                "don't depend on: no data lead there, and the quotient distance leaves it out.",
                "kind": "table",
                "data": {"columns": ["tensor", "share without effect", "inner rate"], "rows": rows},
            }
        ]

    def _samples(self, synthetic: SyntheticData) -> list[dict[str, Any]]:
        if synthetic.x.ndim != 4:
            return []
        write_png(self.folder / "synthetic.png", synthetic.x, columns=15)
        snapshots = sorted(self.folder.glob("synthetic-*.png"))
        singles = []
        for number in range(min(SHOWN, len(synthetic.x))):
            file = self.folder / SAMPLES / f"{number:03d}.png"
            write_png(file, synthetic.x[number : number + 1], columns=1)
            probabilities, classes = synthetic.labels[number].topk(2)
            label = ", ".join(f"{int(c)}: {float(p):.0%}" for p, c in zip(probabilities, classes, strict=True))
            singles.append({"src": str(file.relative_to(self.folder)), "caption": label})
        return [
            {
                "title": "Synthetic samples as they come into being",
                "text": "They begin as noise. What emerges moves a network as the clients' data did; it isn't meant to "
                "look like them.",
                "kind": "images",
                "data": {
                    "pixelated": True,
                    "images": [
                        {"src": snapshot.name, "caption": f"iteration {int(snapshot.stem.split('-')[1])}"}
                        for snapshot in snapshots
                    ],
                },
            },
            {
                "title": "Synthetic samples and their labels",
                "text": f"The first {len(singles)} of {len(synthetic.x)}, each with its two likeliest classes.",
                "kind": "images",
                "data": {"pixelated": True, "small": True, "images": singles},
            },
        ]

    def _evidence(self, quality: Quality) -> list[dict[str, Any]]:
        cosine = quality.cosine_by_segment
        starts = sorted(quality.matching_by_segment)
        return [
            {
                "title": "How well D_syn follows the trajectory",
                "text": "Matching loss at the end of every segment, by the segment's first checkpoint.",
                "kind": "lines",
                "data": {
                    "x": starts,
                    "series": {"matching loss": [quality.matching_by_segment[start] for start in starts]},
                    "xlabel": "segment",
                    "ylabel": "matching loss",
                },
            },
            {
                "title": "Cosine distance to the target checkpoint",
                "text": "After as many steps on D_syn, on as many real samples, on noise (the paper's Figure 6).",
                "kind": "lines",
                "data": {
                    "x": starts,
                    "series": {name: [values[start] for start in starts] for name, values in cosine.items()},
                    "xlabel": "segment",
                    "ylabel": "cosine distance",
                },
            },
            {
                "title": "A network that saw nothing but D_syn",
                "text": "Trained from scratch on the synthetic samples alone.",
                "kind": "table",
                "data": {"columns": ["accuracy"], "rows": [[f"{quality.scratch_accuracy:.2%}"]]},
            },
        ]


def write_png(path: Path, x: Tensor, columns: int) -> None:
    """Write images (N, C, H, W) as one grid; the contrast is stretched to the 1st and 99th percentile."""
    pixels = x.detach().cpu().numpy()
    low, high = np.percentile(pixels, (1, 99))
    pixels = np.clip((pixels - low) / max(high - low, 1e-6), 0, 1)
    count, channels, height, width = pixels.shape
    rows = -(-count // columns)
    grid = np.zeros((rows * columns, height, width, 3))
    grid[:count] = pixels[:, [0, 0, 0] if channels != 3 else [0, 1, 2]].transpose(0, 2, 3, 1)
    grid = grid.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)
    png = io.BytesIO()
    Image.fromarray(np.round(grid * 255).astype(np.uint8)).save(png, "png")
    write_bytes(path, png.getvalue())

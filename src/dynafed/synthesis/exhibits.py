"""Pictures of a synthesis for the report: samples with their labels, their coming into being, and the evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from dynafed.engine.files import write_bytes
from dynafed.synthesis.dataset import Synthetic

if TYPE_CHECKING:
    from dynafed.synthesis.quality import Quality

SNAPSHOTS = (0, 125, 250, 500)
"""The iterations whose images the paper shows; the last one always comes on top."""
SHOWN = 30
"""Samples in a picture of single samples."""


class Album:
    """Follows a synthesis and leaves its pictures in a folder, listed in report.json."""

    def __init__(self, folder: Path, iterations: int) -> None:
        self.folder = folder
        self.wanted = {number for number in SNAPSHOTS if number < iterations} | {iterations}
        self.diary = folder / "synthesis.jsonl"
        self.losses: dict[int, float] = {}
        # A synthesis that goes on after an interruption finds here what came before.
        for line in self.diary.read_text().splitlines() if self.diary.exists() else ():
            self.losses |= {int(number): loss for number, loss in json.loads(line).items()}

    def seen(self, iteration: int, loss: float, x: Tensor) -> None:
        """Note an iteration's loss, and picture the samples if it is one of those to show."""
        self.losses[iteration] = loss
        with self.diary.open("a") as file:
            file.write(json.dumps({iteration: loss}) + "\n")
        if iteration in self.wanted and x.ndim == 4:
            write_png(self.folder / f"synthetic-{iteration:06d}.png", x[:SHOWN], columns=10)

    def close(self, synthetic: Synthetic, quality: Quality | None) -> None:
        """Write synthetic.png and report.json."""
        blocks = [*self._curves(), *self._samples(synthetic), *(self._evidence(quality) if quality else ())]
        write_bytes(self.folder / "report.json", json.dumps(blocks).encode())

    def _curves(self) -> list[dict[str, Any]]:
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

    def _samples(self, synthetic: Synthetic) -> list[dict[str, Any]]:
        if synthetic.x.ndim != 4:
            return []
        write_png(self.folder / "synthetic.png", synthetic.x, columns=15)
        stages = sorted(self.folder.glob("synthetic-*.png"))
        singles = []
        for number in range(min(SHOWN, len(synthetic.x))):
            file = self.folder / "samples" / f"{number:03d}.png"
            write_png(file, synthetic.x[number : number + 1], columns=1)
            chances, classes = synthetic.labels[number].topk(2)
            label = ", ".join(f"{int(c)}: {float(p):.0%}" for p, c in zip(chances, classes, strict=True))
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
                        {"src": stage.name, "caption": f"iteration {int(stage.stem.split('-')[1])}"} for stage in stages
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
        begins = sorted(quality.matching_by_segment)
        return [
            {
                "title": "How well D_syn follows the trajectory",
                "text": "Matching loss at the end of every segment, by the segment's first checkpoint.",
                "kind": "lines",
                "data": {
                    "x": begins,
                    "series": {"matching loss": [quality.matching_by_segment[begin] for begin in begins]},
                    "xlabel": "segment",
                    "ylabel": "matching loss",
                },
            },
            {
                "title": "Cosine distance to the target checkpoint",
                "text": "After as many steps on D_syn, on as many real samples, on noise (the paper's Figure 6).",
                "kind": "lines",
                "data": {
                    "x": begins,
                    "series": {name: [values[begin] for begin in begins] for name, values in cosine.items()},
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
    """Images side by side in rows; the contrast is stretched to what most pixels have."""
    pixels = x.detach().cpu().numpy()
    low, high = np.percentile(pixels, (1, 99))
    pixels = np.clip((pixels - low) / max(high - low, 1e-6), 0, 1)
    count, channels, height, width = pixels.shape
    rows = -(-count // columns)
    sheet = np.zeros((rows * columns, height, width, 3))
    sheet[:count] = pixels[:, [0, 0, 0] if channels != 3 else [0, 1, 2]].transpose(0, 2, 3, 1)
    sheet = sheet.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.round(sheet * 255).astype(np.uint8)).save(path)

"""Images by folder, CLIENT/CLASS/FILE.png: FedAvg against DynaFed.

python examples/own-data/images.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

import dynafed

CLASSES = ("columns", "rows", "squares")


def draw(kind: str, rng: np.random.Generator) -> Image.Image:
    """A gray image of 8x8 with noise."""
    pixels = rng.normal(100, 20, (8, 8))
    at = rng.integers(1, 6)
    if kind == "columns":
        pixels[:, at : at + 2] += 90
    elif kind == "rows":
        pixels[at : at + 2] += 90
    else:
        pixels[at : at + 3, at : at + 3] += 90
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_images(folder: Path) -> None:
    """Nine clients with two classes each, and test images with all."""
    rng = np.random.default_rng(0)
    holders = {f"clients/camera-{number}": (CLASSES[number % 3], CLASSES[(number + 1) % 3]) for number in range(9)}
    for holder, kinds in (holders | {"test": CLASSES}).items():
        for kind in kinds:
            (folder / holder / kind).mkdir(parents=True, exist_ok=True)
            for number in range(20):
                draw(kind, rng).save(folder / holder / kind / f"{number:03d}.png")


def main(folder: Path = Path(), rounds: int = 20) -> dict[str, float]:
    """Run both methods; returns their accuracy."""
    write_images(folder)
    found = {}
    for method in ("fedavg", "dynafed"):
        config = dynafed.Config.load(
            None,
            {
                "method": method,
                "rounds": rounds,
                "participation": 0.5,
                "mlp.width": 32,
                "data.path": str(folder.absolute() / "clients"),
                "data.test": str(folder.absolute() / "test"),
                "dynafed.trajectory": rounds // 2,
                "dynafed.iterations": 30,
                "dynafed.inner_steps": 5,
                "dynafed.samples": 30,
            },
        )
        result = dynafed.run(config, out=folder / method)
        found[method] = result.final_accuracy
        print(f"{method}: accuracy {result.final_accuracy:.1%}")
    return found


if __name__ == "__main__":
    main()

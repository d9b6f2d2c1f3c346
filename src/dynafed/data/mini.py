"""Rebuilds the dataset that is part of the package: `python -m dynafed.data.mini [SOURCE_FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

from dynafed.data.catalog import BUILTIN, MINI
from dynafed.data.formats import Split, pack
from dynafed.data.loading import load
from dynafed.data.partition import carve
from dynafed.seeds import Seeds


def build(folder: Path | None, target: Path = MINI) -> None:
    """Write fmnist-mini: a stratified sample of FashionMNIST, always the same."""
    whole = load("fmnist", folder)
    mini = BUILTIN["fmnist-mini"]

    def draw(split: str, size: int) -> Split:
        x, y = getattr(whole, f"{split}_x").numpy(), getattr(whole, f"{split}_y").numpy()
        _, drawn = carve(y, size, Seeds(0).rng("fmnist-mini", split))
        return x[drawn], y[drawn]

    pack(target, {"train": draw("train", mini.train), "test": draw("test", mini.test)})


if __name__ == "__main__":
    build(Path(sys.argv[1]) if sys.argv[1:] else None)

"""Images as arrays: from a folder with a sub-folder for each class, or from any list of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dynafed.errors import UserError

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"))


def is_image(path: Path) -> bool:
    """Whether a file is an image, by its name."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def class_folders(folder: Path) -> list[Path]:
    """The sub-folders that hold images, sorted by name: each is a class."""
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and any(map(is_image, path.iterdir()))]


def read_image_folder(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The images `folder/CLASS/FILE`, sorted by class and name, and the name of each one's class."""
    files = [file for each in class_folders(folder) for file in sorted(filter(is_image, each.iterdir()))]
    if not files:
        raise UserError(f"{folder} has no images in sub-folders, one for each class: put them there")
    return stack_images([_open(file) for file in files], str(folder)), np.array([file.parent.name for file in files])


def stack_images(images: Sequence[Image.Image | Any], where: str) -> np.ndarray:
    """Images of one size as uint8 (N, C, H, W): one channel if all are gray, else three."""
    if len(sizes := {image.size for image in images}) > 1:
        raise UserError(f"{where} has images of {len(sizes)} sizes, such as {sorted(sizes)[:2]}: make them alike first")
    mode = "L" if {image.mode for image in images} <= {"1", "L"} else "RGB"
    pixels = np.stack([np.asarray(image.convert(mode)) for image in images])
    return pixels[:, None] if mode == "L" else pixels.transpose(0, 3, 1, 2)


def _open(file: Path) -> Image.Image:
    try:
        with Image.open(file) as image:
            image.load()
            return image
    except Exception as error:  # a damaged image fails in whatever way its decoder does
        raise UserError(f"{file} is no image that can be read ({error}): replace it") from None

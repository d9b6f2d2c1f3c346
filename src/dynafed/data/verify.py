"""Is this dataset what it says it is?"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynafed.data.dataset import Dataset, measure
from dynafed.data.formats import Array
from dynafed.data.sources import SOURCES, find, load

OFFICIAL: dict[str, tuple[str, ...]] = {
    "fmnist": (
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
    "mnist": (
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
    "cifar10": (
        "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "26e2849e66a845b7f1e4614ae70f4889ae604628",
        "67eb016db431130d61cd03c7ad570b013799c88c",
    ),
    "cifar100": ("e207cd2e05b73b1393c74c7f5e7bea451d63e08e", "8fb6623e830365ff53cf14adec797474f5478006"),
}
"""Of the official files, uncompressed: MD5 of IDX files (images, labels; train, test), SHA-1 of CIFAR's binary ones."""

COARSE = np.frombuffer(
    b"eboiaghhsddojshldjhlglfkhgnpdpalbkmoqjlfftiipnorskqerecaresrkdcmmqmbjtckabqmjnpnqtcegtffitsbcpgarion", np.uint8
) - ord("a")
"""CIFAR-100's superclass of each class (a is 0), which its files hold before the class."""


def check(name: str, folder: Path | None) -> dict[str, Any]:
    """Load a dataset and report on it, in plain values; `official` is None where no official checksum is known."""
    dataset = load(name, folder)
    found = find(name, folder) if name in SOURCES else None
    mean, std = measure(dataset.train_x)
    return {
        "name": dataset.name,
        "where": str(found[0]) if found else None,
        "format": found[1].title if found else None,
        "train": len(dataset.train_y),
        "test": len(dataset.test_y),
        "classes": dataset.classes,
        "shape": list(dataset.shape),
        "train_class_counts": torch.bincount(dataset.train_y, minlength=dataset.classes).tolist(),
        "test_class_counts": torch.bincount(dataset.test_y, minlength=dataset.classes).tolist(),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "measured_mean": [round(value, 4) for value in mean],
        "measured_std": [round(value, 4) for value in std],
        "sha256": _sha256(dataset),
        "official": tuple(_official_checksums(dataset)) == OFFICIAL[dataset.name] if dataset.name in OFFICIAL else None,
    }


def _sha256(dataset: Dataset) -> str:
    hasher = hashlib.sha256()
    for tensor in (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y):
        array = np.ascontiguousarray(tensor)
        hasher.update(f"{array.dtype.str}{array.shape}".encode())
        hasher.update(array.data)
    return hasher.hexdigest()


def _official_checksums(dataset: Dataset) -> Iterator[str]:
    """The checksums that the official files would have if they held these samples."""
    for x, y in ((dataset.train_x, dataset.train_y), (dataset.test_x, dataset.test_y)):
        pixels, labels = np.asarray(x), np.asarray(y).astype(np.uint8)
        if "mnist" in dataset.name:
            yield from (_idx_md5(pixels[:, 0]), _idx_md5(labels))
            continue
        coarse = (COARSE[labels],) if dataset.name == "cifar100" else ()
        records = np.column_stack([*coarse, labels, pixels.reshape(len(pixels), -1)])
        per_file = 10_000 if dataset.name == "cifar10" else len(records)
        for start in range(0, len(records), per_file):
            yield hashlib.sha1(records[start : start + per_file].data, usedforsecurity=False).hexdigest()


def _idx_md5(array: Array) -> str:
    header = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape)
    return hashlib.md5(header + array.tobytes(), usedforsecurity=False).hexdigest()

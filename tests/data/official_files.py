"""Writes tiny files in the official formats."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np


def idx_bytes(array):
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, train, test, zipped=()):
    folder.mkdir(parents=True, exist_ok=True)
    for stem, (x, y) in {"train": train, "t10k": test}.items():
        for name, array in {f"{stem}-images-idx3-ubyte": x, f"{stem}-labels-idx1-ubyte": y}.items():
            data = idx_bytes(array)
            if name in zipped or zipped == "all":
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)


def write_files(place: Path, inner: str, files: dict[str, bytes]):
    """Files in PLACE/INNER, or in a tar at PLACE if its name says so."""
    if place.name.endswith(".tar.gz"):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(place, "w:gz") as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(f"{inner}/{name}" if inner else name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return
    for name, data in files.items():
        path = place / inner / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

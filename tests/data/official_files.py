"""Writes tiny files in the official formats."""

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path
from typing import ClassVar

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


class Python2Pickler(pickle._Pickler):
    """Writes str and bytes as Python 2 wrote its strings, as the official files have them."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        data = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string


def python2_pickle(value):
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue().replace(b"cnumpy._core.multiarray", b"cnumpy.core.multiarray")


def cifar_files(name, batches, dump):
    files = {}
    for file, (x, y) in batches.items():
        if dump is None:
            coarse = [np.zeros((len(y), 1), np.uint8)] if name == "cifar100" else []
            records = [*coarse, y[:, None].astype(np.uint8), x.reshape(len(x), -1)]
            files[f"{file}.bin"] = np.concatenate(records, axis=1).tobytes()
        else:
            labels = {"cifar10": "labels", "cifar100": "fine_labels"}[name]
            files[file] = dump({"batch_label": "a batch", labels: y.tolist(), "data": x.reshape(len(x), -1)})
    return files

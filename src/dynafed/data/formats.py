"""Readers of the files that datasets come in; every one returns uint8 images (N, C, H, W) and int64 labels.

A reader is given the path by which the format was recognised and finds the files beside it by their official names.
"""

from __future__ import annotations

import gzip
import io
import lzma
import pickle
import re
import struct
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dynafed.errors import UserError

Array = NDArray[Any]
Split = tuple[Array, Array]
Splits = tuple[Split, Split]
FileNames = tuple[list[str], list[str]]

IDX_STEMS = ("train", "t10k")


def idx(marker: Path) -> Splits:
    """MNIST's format: four files, each raw or gzipped; `marker` is one of them."""

    def split(stem: str) -> Split:
        images = _idx_file(marker.parent, f"{stem}-images-idx3-ubyte", dimensions=3)
        labels = _idx_file(marker.parent, f"{stem}-labels-idx1-ubyte", dimensions=1)
        return _checked(marker.parent, images[:, None], labels)

    train, test = map(split, IDX_STEMS)
    return train, test


def idx_contents(split: Split) -> Iterator[bytes]:
    """The contents of the IDX files of a split: images, then labels."""
    images, labels = split
    for array in (images[:, 0], labels.astype(np.uint8)):
        yield struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def cifar_binary(path: Path, files: FileNames, label_bytes: int) -> Splits:
    """CIFAR's binary version, a folder or a tar: each record is `label_bytes` labels (the last counts) and pixels."""

    def decode(data: bytes) -> Split:
        records = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + 3072)
        return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1]

    return _cifar(path, files, decode)


def cifar_contents(split: Split, per_file: int, superclasses: Array | None = None) -> Iterator[memoryview]:
    """The contents of CIFAR's binary files of a split, `per_file` samples each."""
    images, labels = split
    coarse = [] if superclasses is None else [superclasses[labels]]
    records = np.column_stack([*coarse, labels.astype(np.uint8), images.reshape(len(images), -1)])
    for start in range(0, len(records), per_file):
        yield records[start : start + per_file].data


def cifar_python(path: Path, files: FileNames, label_key: str) -> Splits:
    """CIFAR's Python version, a folder or a tar of pickles, in which only arrays and plain values are allowed."""

    def decode(data: bytes) -> Split:
        batch = _PlainUnpickler(io.BytesIO(data), encoding="latin1").load()
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        return np.asarray(batch["data"], np.uint8).reshape(-1, 3, 32, 32), np.asarray(batch[label_key])

    return _cifar(path, files, decode)


def image_files(path: Path, class_names: tuple[str, ...]) -> Splits:
    """PNG images SPLIT/CLASS/*.png of the splits train and test, in a folder or a tar, sorted by class and name."""
    pattern = re.compile(rf"(?:.*/)?(train|test)/({'|'.join(class_names)})/[^/]+\.png")
    found: dict[str, list[tuple[str, Array, int]]] = {"train": [], "test": []}
    with _reading(path):
        for name, data in _members(path, lambda name: pattern.fullmatch(name) is not None):
            split, label = pattern.fullmatch(name).groups()  # type: ignore[union-attr]
            with Image.open(io.BytesIO(data)) as image:
                pixels = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
            found[split].append((f"{label}/{PurePosixPath(name).name}", pixels, class_names.index(label)))
        for split, entries in found.items():
            if not entries:
                raise UserError(f"{path} has no images {split}/CLASS/*.png")
            entries.sort(key=lambda entry: entry[0])
        train, test = (
            _checked(path, np.stack([entry[1] for entry in entries]), np.array([entry[2] for entry in entries]))
            for entries in found.values()
        )
    return train, test


def packed(path: Path) -> Splits:
    """Both splits of a packed .npz, or of NAME_train.npz and NAME_test.npz."""
    test = path.with_name(path.name.replace("_train", "_test"))
    return packed_split(path, "train"), packed_split(test, "test")


def packed_split(path: Path, split: str) -> Split:
    """One split of a packed .npz: an xz stream of the raw array, or lossless WebP mosaics 100 images wide."""
    with _reading(path), np.load(path, allow_pickle=False) as file:
        if f"{split}_xz" in file:
            raw = lzma.decompress(file[f"{split}_xz"].tobytes())
            images = np.frombuffer(raw, np.uint8).reshape(file[f"{split}_shape"])
        else:
            keys = sorted(key for key in file.files if key.startswith(f"{split}_webp"))
            mosaics = [file[key].tobytes() for key in sorted(keys, key=len)]
            with ThreadPoolExecutor() as pool:
                images = np.concatenate(list(pool.map(_tiles, mosaics)))[: int(file[f"{split}_count"])]
        return _checked(path, images.transpose(0, 3, 1, 2), file[f"{split}_labels"])


def pack(path: Path, splits: dict[str, Split]) -> None:
    """Write splits as `packed` reads them; the same splits give the same bytes."""
    arrays: dict[str, Array] = {}
    for split, (images, labels) in splits.items():
        pixels = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
        stream = lzma.compress(pixels.tobytes(), preset=9 | lzma.PRESET_EXTREME)
        arrays[f"{split}_xz"] = np.frombuffer(stream, np.uint8)
        arrays[f"{split}_shape"] = np.array(pixels.shape)
        arrays[f"{split}_labels"] = labels.astype(np.uint8)
    np.savez(path, allow_pickle=False, **arrays)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} is missing: put it there") from None
    except Exception as error:  # a damaged file can fail in every way that its decoder knows
        reason = str(error) or type(error).__name__
        raise UserError(f"{path} is damaged or not what its name says ({reason}): replace it") from error


def _checked(path: Path, images: Array, labels: Array) -> Split:
    if len(images) != len(labels) or not len(images):
        raise UserError(f"{path} has {len(images)} images but {len(labels)} labels: replace it")
    return np.ascontiguousarray(images), labels.astype(np.int64)


def _idx_file(folder: Path, name: str, dimensions: int) -> Array:
    path = folder / name
    if not path.exists():
        path = folder / f"{name}.gz"
    if not path.exists():
        raise UserError(f"{folder} lacks {name} (or {name}.gz): put it there")
    with _reading(path):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        # Two zero bytes, the type (8: unsigned byte), the number of dimensions, then each dimension.
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", data)
        if magic != 0x800 + dimensions:
            raise ValueError(f"its magic number is {magic}, not {0x800 + dimensions}")
        return np.frombuffer(data, np.uint8, offset=4 * (1 + dimensions)).reshape(shape)


def _cifar(path: Path, files: FileNames, decode: Callable[[bytes], Split]) -> Splits:
    wanted = {name for names in files for name in names}
    with _reading(path):
        batches = {name: decode(data) for name, data in _members(path, wanted.__contains__)}
        if missing := sorted(wanted - batches.keys()):
            raise UserError(f"{path} lacks {', '.join(missing)}: replace it")
        train, test = (
            _checked(path, *map(np.concatenate, zip(*(batches[name] for name in names), strict=True)))
            for names in files
        )
    return train, test


def _members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Names (with the folder's own) and contents of files in a folder or a tar, which is never extracted."""
    if path.is_dir():
        for file in path.rglob("*"):
            if wanted(name := file.relative_to(path.parent).as_posix()) and file.is_file():
                yield name, file.read_bytes()
        return
    with tarfile.open(path) as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if member.isfile() and wanted(name) and (content := tar.extractfile(member)):
                yield name, content.read()


def _tiles(mosaic: bytes) -> Array:
    with Image.open(io.BytesIO(mosaic)) as image:
        pixels = np.asarray(image.convert("RGB"))
    side = pixels.shape[1] // 100
    return pixels.reshape(-1, side, 100, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)


_rebuild_array = np.zeros(0).__reduce__()[0]


class _PlainUnpickler(pickle.Unpickler):
    """Rebuilds numpy arrays and plain values; a pickle that asks for anything else is refused unrun."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "numpy", "ndarray":
                return np.ndarray
            case "numpy", "dtype":
                return np.dtype
            case "numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct":
                return _rebuild_array
        raise pickle.UnpicklingError(f"it asks to run {module}.{name}, which no CIFAR file does")

"""Readers of the formats in which datasets are stored; all but `npz` return uint8 images (N, C, H, W) and int64 labels.

A reader is given the path by which the format was recognized and finds the other files by their official names.
Nothing is unpickled or extracted to disk, and nothing is unpacked beyond `max_bytes`.
"""

from __future__ import annotations

import gzip
import io
import lzma
import math
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dynafed.data.cifar_pickle import read_batch
from dynafed.errors import UserError

Array = NDArray[Any]
Split = tuple[Array, Array]
Splits = tuple[Split, Split]
FileNames = tuple[list[str], list[str]]

XZ_MEMORY = 2**28
"""The most memory of an xz decoder; the strongest preset needs a quarter of it."""


class Budget:
    """The bytes that may still be unpacked from `path`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, self.max_bytes, self.left = path, max_bytes, max_bytes

    def spend(self, count: int) -> None:
        """Count bytes before they are unpacked, or just after; raises `UserError` if there are too many."""
        self.left -= count
        if self.left < 0:
            raise UserError(
                f"{self.path} unpacks to more than {self.max_bytes:,} bytes, too many for this dataset: replace it"
            )


class BoundedReader:
    """A file, raw or gzipped whatever its name is, that is read from start to end within a budget."""

    def __init__(self, file: IO[bytes], budget: Budget) -> None:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        self.file: Any = gzip.GzipFile(fileobj=file) if zipped else file
        self.budget = budget

    def read(self, size: int) -> bytes:
        """At most `size` bytes."""
        data: bytes = self.file.read(size)
        self.budget.spend(len(data))
        return data

    def read_all(self) -> bytes:
        """The rest of the file."""
        return b"".join(iter(lambda: self.read(2**20), b""))


def idx(marker: Path, max_bytes: int) -> Splits:
    """MNIST's format: four files, each raw or gzipped; `marker` is one of them."""
    folder, budget = marker.parent, Budget(marker.parent, max_bytes)

    def split(stem: str) -> Split:
        images = _idx_file(folder, f"{stem}-images-idx3-ubyte", 3, budget)
        labels = _idx_file(folder, f"{stem}-labels-idx1-ubyte", 1, budget)
        return _checked(folder, images[:, None], labels)

    return split("train"), split("t10k")


def idx_contents(split: Split) -> Iterator[bytes]:
    """The contents of the IDX files of a split: images, then labels."""
    images, labels = split
    for array in (images[:, 0], labels.astype(np.uint8)):
        yield struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def cifar_binary(path: Path, max_bytes: int, *, files: FileNames, label_bytes: int) -> Splits:
    """CIFAR's binary version, a folder or a tar: each record is `label_bytes` labels (the last counts) and pixels."""

    def decode(data: bytes) -> Split:
        records = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + 3072)
        return records[:, label_bytes:], records[:, label_bytes - 1]

    return _cifar(path, max_bytes, files, decode)


def cifar_contents(split: Split, per_file: int, superclasses: Array | None = None) -> Iterator[memoryview]:
    """The contents of CIFAR's binary files of a split, `per_file` samples each."""
    images, labels = split
    coarse = [] if superclasses is None else [superclasses[labels]]
    records = np.column_stack([*coarse, labels.astype(np.uint8), images.reshape(len(images), -1)])
    for start in range(0, len(records), per_file):
        yield records[start : start + per_file].data


def cifar_python(path: Path, max_bytes: int, *, files: FileNames, label_key: str) -> Splits:
    """CIFAR's Python version, a folder or a tar of pickles, which are parsed but never unpickled."""
    return _cifar(path, max_bytes, files, lambda data: read_batch(data, label_key))


def image_files(path: Path, max_bytes: int, *, class_names: tuple[str, ...]) -> Splits:
    """PNG images SPLIT/CLASS/*.png of the splits train and test, in a folder or a tar, sorted by class and name."""
    pattern = re.compile(rf"(?:.*/)?(train|test)/({'|'.join(class_names)})/[^/]+\.png")
    found: dict[str, list[tuple[str, Array, int]]] = {"train": [], "test": []}
    pixels = Budget(path, max_bytes)
    with _user_errors(path):
        for name, data in _members(path, max_bytes, lambda name: pattern.fullmatch(name) is not None):
            split, label = pattern.fullmatch(name).groups()  # type: ignore[union-attr]
            image = _rgb(_open_image(data, pixels)).transpose(2, 0, 1)
            found[split].append((f"{label}/{PurePosixPath(name).name}", image, class_names.index(label)))
        for split, entries in found.items():
            if not entries:
                raise UserError(f"{path} has no images {split}/CLASS/*.png")
            entries.sort(key=lambda entry: entry[0])
        train, test = (
            _checked(path, np.stack([entry[1] for entry in entries]), np.array([entry[2] for entry in entries]))
            for entries in found.values()
        )
    return train, test


def npz(path: Path, max_bytes: int) -> Splits:
    """The arrays train_x, train_y, test_x and test_y of an .npz, of any shape and type."""
    with _user_errors(path):
        train_x, train_y, test_x, test_y = npz_arrays(path, ("train_x", "train_y", "test_x", "test_y"), max_bytes)
    return (train_x, train_y), (test_x, test_y)


def npz_arrays(path: Path, names: Sequence[str], max_bytes: int = 2**40) -> list[Array]:
    """Arrays of an .npz by name, without unpickling; raises whatever reading it does."""
    budget = Budget(path, max_bytes)
    with zipfile.ZipFile(path) as file:
        return [_array(file, name, budget) for name in names]


def packed(path: Path, max_bytes: int) -> Splits:
    """Both splits of a packed .npz, or of NAME_train.npz and NAME_test.npz."""
    test = path.with_name(path.name.replace("_train", "_test"))
    return packed_split(path, max_bytes, "train"), packed_split(test, max_bytes, "test")


def packed_split(path: Path, max_bytes: int, split: str) -> Split:
    """One split of a packed .npz: an xz stream of the raw array, or lossless WebP mosaics 100 images wide."""
    stored, pixels = Budget(path, max_bytes), Budget(path, max_bytes)
    with _user_errors(path), zipfile.ZipFile(path) as file:
        names = [name.removesuffix(".npy") for name in file.namelist()]
        if f"{split}_xz" in names:
            shape = _array(file, f"{split}_shape", stored).tolist()
            if min(shape) < 0:
                raise ValueError(f"its shape is {shape}")
            pixels.spend(size := math.prod(shape))
            stream = _array(file, f"{split}_xz", stored).tobytes()
            raw = lzma.LZMADecompressor(memlimit=XZ_MEMORY).decompress(stream, max_length=size + 1)
            images = np.frombuffer(raw, np.uint8).reshape(shape)
        else:
            keys = sorted(name for name in names if name.startswith(f"{split}_webp"))
            mosaics = [_open_image(_array(file, key, stored).tobytes(), pixels) for key in sorted(keys, key=len)]
            with ThreadPoolExecutor() as pool:
                images = np.concatenate(list(pool.map(_tiles, mosaics)))[: int(_array(file, f"{split}_count", stored))]
        return _checked(path, images.transpose(0, 3, 1, 2), _array(file, f"{split}_labels", stored))


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
def _user_errors(path: Path) -> Iterator[None]:
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
    if labels.dtype.kind not in "iu":
        raise UserError(f"{path} has labels of type {labels.dtype}, not whole numbers: replace it")
    return np.ascontiguousarray(images), labels.astype(np.int64)


def _idx_file(folder: Path, name: str, dimensions: int, budget: Budget) -> Array:
    path = folder / name
    if not path.exists():
        path = folder / f"{name}.gz"
    if not path.exists():
        raise UserError(f"{folder} lacks {name} (or {name}.gz): put it there")
    with _user_errors(path):
        data = _content(path, budget)
        # Two zero bytes, the type (8: unsigned byte), the number of dimensions, then each dimension.
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", data)
        if magic != 0x800 + dimensions:
            raise ValueError(f"its magic number is {magic}, not {0x800 + dimensions}")
        return np.frombuffer(data, np.uint8, offset=4 * (1 + dimensions)).reshape(shape)


def _cifar(path: Path, max_bytes: int, files: FileNames, decode: Callable[[bytes], Split]) -> Splits:
    wanted = {name for names in files for name in names}
    with _user_errors(path):
        batches = {name: decode(data) for name, data in _members(path, max_bytes, wanted.__contains__)}
        if missing := sorted(wanted - batches.keys()):
            raise UserError(f"{path} lacks {', '.join(missing)}: replace it")

        def split(names: list[str]) -> Split:
            pixels, labels = map(np.concatenate, zip(*(batches[name] for name in names), strict=True))
            return _checked(path, pixels.reshape(-1, 3, 32, 32), labels)

        return split(files[0]), split(files[1])


def _content(path: Path, budget: Budget) -> bytes:
    with path.open("rb") as file:
        return BoundedReader(file, budget).read_all()


def _members(path: Path, max_bytes: int, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Names (with the folder's own) and contents of files in a folder or a tar, which is never extracted to disk."""
    budget = Budget(path, max_bytes)
    if path.is_dir():
        for file in path.rglob("*"):
            if wanted(name := file.relative_to(path.parent).as_posix()) and file.is_file():
                yield name, _content(file, budget)
        return
    with path.open("rb") as raw, tarfile.open(fileobj=BoundedReader(raw, budget), mode="r|", bufsize=2**20) as tar:  # type: ignore[call-overload]
        while member := tar.next():
            tar.members.clear()  # else it keeps every one
            name = member.name.removeprefix("./")
            # A sparse member can be larger than what is stored of it.
            if member.isfile() and not member.issparse() and wanted(name) and (content := tar.extractfile(member)):
                yield name, content.read()


def _array(file: zipfile.ZipFile, key: str, budget: Budget) -> Array:
    """One array of an .npz."""
    info = file.getinfo(f"{key}.npy")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack without bounds
        raise ValueError(f"{key} is compressed in a way that numpy doesn't use")
    budget.spend(info.file_size)
    with file.open(info) as member:
        data = member.read(info.file_size)
    header = io.BytesIO(data)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, fortran, dtype = read_header[np.lib.format.read_magic(header)](header)
    return np.frombuffer(data, dtype, offset=header.tell()).reshape(shape, order="F" if fortran else "C")


def _open_image(data: bytes, budget: Budget) -> Image.Image:
    """An image of which only the header is read yet."""
    image = Image.open(io.BytesIO(data))
    budget.spend(3 * image.width * image.height)
    return image


def _rgb(image: Image.Image) -> Array:
    with image:
        return np.asarray(image.convert("RGB"))


def _tiles(mosaic: Image.Image) -> Array:
    pixels = _rgb(mosaic)
    side = pixels.shape[1] // 100
    return pixels.reshape(-1, side, 100, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)

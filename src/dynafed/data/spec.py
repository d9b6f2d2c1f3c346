"""The record that describes a dataset, and the registry of all datasets."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynafed.errors import UserError
from dynafed.registry import Registry

if TYPE_CHECKING:  # the registry can be asked for names without torch
    from dynafed.data.arrays import Dataset
    from dynafed.data.formats import Split, Splits

    Loader = Callable[[Path | None], Dataset | tuple[tuple[Any, Any], tuple[Any, Any]]]


@dataclass(frozen=True)
class Format:
    """One form in which a dataset may be stored.

    `read(path, max_bytes)` returns both splits and unpacks no more than `max_bytes`. `path` is the first of `markers`
    that exists: a file or folder, absolute or relative to the data folder. A format with a `module` has no markers:
    the samples are part of that installed module, and `path` is its folder.
    """

    title: str
    read: Callable[[Path, int], Splits]
    markers: tuple[str, ...] = ()
    module: str = ""
    suffix: str = ""
    """Added to the dataset's name if the format holds only some of its samples."""
    sizes: tuple[int, int] | None = None
    """How many samples for training and testing these are then."""


@dataclass(frozen=True)
class Download:
    """The official files' base URL, and their published MD5 checksums by file name."""

    url: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Checksums:
    """Official checksums of the uncompressed files, in the order of `contents(train)` and `contents(test)`.

    `contents` takes a split and yields what the official files of these samples contain, so that samples from any
    format can be compared with the official ones.
    """

    algorithm: str
    digests: tuple[str, ...]
    contents: Callable[[Split], Iterator[bytes | memoryview]]

    def match(self, splits: Splits) -> bool:
        """Whether these are the official samples."""
        found = (
            hashlib.new(self.algorithm, content, usedforsecurity=False).hexdigest()
            for split in splits
            for content in self.contents(split)
        )
        return tuple(found) == self.digests


@dataclass(frozen=True)
class DatasetSpec:
    """Everything known about a dataset before its samples are read.

    `shape` is one sample's; `train` and `test` are the sizes of the splits. `mean` and `std` normalize uint8 samples,
    one value per channel on a scale of 0 to 1; without them they are measured. The first of `formats` that is found
    is read.
    """

    name: str
    class_names: tuple[str, ...]
    shape: tuple[int, ...]
    train: int
    test: int
    formats: tuple[Format, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    download: Download | None = None
    checksums: Checksums | None = None
    note: str = ""
    license_name: str = ""
    citation: str = ""

    def __post_init__(self) -> None:
        channels = self.shape[0] if len(self.shape) == 3 else 1
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, channels):
            raise UserError(
                f"dataset '{self.name}' has mean = {self.mean} and std = {self.std}: each needs {channels} values, "
                "one per channel"
            )

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def max_bytes(self) -> int:
        """The most that its files may unpack to: four bytes per value, and some for labels, names and headers."""
        return 4 * (self.train + self.test) * (math.prod(self.shape) + 64) + 2**20

    @property
    def summary(self) -> str:
        """Note, license and citation in one line."""
        return "; ".join(filter(None, (self.note, self.license_name, self.citation and f"cite {self.citation}")))


def _builtin() -> Mapping[str, DatasetSpec]:
    from dynafed.data.catalog import BUILTIN

    return BUILTIN


DATASETS: Registry[DatasetSpec | Loader] = Registry("dataset", _builtin)
"""All datasets by name. A part is a `DatasetSpec`, or a function of the data folder (a path or None) that returns a
`Dataset` or the arrays `((train_x, train_y), (test_x, test_y))`."""


NODES = "nodes"
"""In place of a dataset's name: each node of Flower has samples of its own."""


def check_name(name: str) -> None:
    """Raise `UserError` for a name that no dataset has; imports nothing."""
    if not _is_unnamed(name):
        DATASETS.check(name)


def _is_unnamed(name: str) -> bool:
    """Whether there is no record of it: what is given in Python, what is on Flower's nodes, `hf:NAME`."""
    return name in ("custom", NODES) or name.startswith("hf:")


def get_spec(name: str) -> DatasetSpec | None:
    """The record of the dataset of this name; None for a dataset without one: a function, `hf:NAME`, "custom"."""
    check_name(name)
    part = None if _is_unnamed(name) else DATASETS.load(name)
    return part if isinstance(part, DatasetSpec) else None

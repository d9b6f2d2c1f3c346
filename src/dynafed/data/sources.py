"""The datasets we know by name: what they are, where they may lie and in which formats."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dynafed.data import formats
from dynafed.data.dataset import Dataset, from_arrays
from dynafed.data.download import by_hand
from dynafed.data.formats import Array, Splits
from dynafed.data.huggingface import load_hf
from dynafed.data.partition import carve
from dynafed.errors import UserError
from dynafed.seeds import Seeds
from dynafed.settings import nearest

BUILTIN = Path(__file__).with_name("builtin") / "fmnist-mini.npz"


@dataclass(frozen=True)
class Format:
    """One way in which a dataset may lie on disk: `read` gets the first of `markers` that exists."""

    title: str
    markers: tuple[str, ...]
    read: Callable[[Path], Splits]
    suffix: str = ""
    """Added to the dataset's name where these are not all of its samples."""


@dataclass(frozen=True)
class Source:
    """What is known of a dataset before any of it is read."""

    classes: int
    shape: tuple[int, int, int]
    train: int
    test: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str
    formats: tuple[Format, ...]


def _under(folders: tuple[str, ...], *files: str) -> tuple[str, ...]:
    return tuple(str(Path(folder, file)) for folder in folders for file in files)


def _halves(x: Array, y: Array, held: int, purpose: str) -> Splits:
    """A fixed split of samples that come without one, the same for every run."""
    train, test = carve(y, held, Seeds(0).rng(purpose))
    return (x[train], y[train]), (x[test], y[test])


def _digits(_: Path) -> Splits:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    return _halves(images, bunch.target.astype(np.int64), 360, "digits")


def _packed(path: Path) -> Splits:
    test = path.with_name(path.name.replace("_train", "_test"))
    return formats.packed(path, "train"), formats.packed(test, "test")


def _cinic_sample(path: Path) -> Splits:
    x, y = formats.packed(path, "test")
    return _halves(x, y, len(y) // 2, "cinic10-sample")


def _idx_markers(*folders: str) -> tuple[str, ...]:
    return _under(folders, "train-images-idx3-ubyte", "train-images-idx3-ubyte.gz")


def _cifar(
    name: str, binary: str, python: str, files: formats.Names, label_bytes: int, label_key: str
) -> tuple[Format, ...]:
    def inside(folder: str, suffix: str) -> formats.Names:
        train, test = ([f"{folder}/{file}{suffix}" for file in split] for split in files)
        return train, test

    folders, number = ("", name, name.upper()), name.removeprefix("cifar")
    return (
        Format(
            "official binary version",
            _under(folders, binary, f"cifar-{number}-binary.tar.gz"),
            partial(formats.cifar_binary, files=inside(binary, ".bin"), label_bytes=label_bytes),
        ),
        Format(
            "official Python version",
            _under(folders, python, f"cifar-{number}-python.tar.gz"),
            partial(formats.cifar_python, files=inside(python, ""), label_key=label_key),
        ),
        Format("packed", _under(folders, f"{name}_train.npz"), _packed),
    )


_CINIC = ("cinic10", "CINIC10", "cinic-10", "CINIC-10")
_FMNIST = {"mean": (0.2860,), "std": (0.3530,), "classes": 10, "shape": (1, 28, 28)}
_ZALANDO = "MIT, (c) 2017 Zalando SE; cite Xiao, Rasul and Vollgraf 2017"
_KRIZHEVSKY = "no licence stated; cite Krizhevsky 2009"

SOURCES: dict[str, Source] = {
    "fmnist-mini": Source(
        **_FMNIST,  # type: ignore[arg-type]
        train=10_000,
        test=2_000,
        note=f"a part of FashionMNIST, built in; {_ZALANDO}",
        formats=(Format("built in", (str(BUILTIN),), _packed),),
    ),
    "digits": Source(
        classes=10,
        shape=(1, 8, 8),
        train=1_437,
        test=360,
        mean=(0.3057,),
        std=(0.3762,),
        note="comes with scikit-learn; CC BY 4.0; cite Alpaydin and Kaynak 1998",
        formats=(Format("scikit-learn", (), _digits),),
    ),
    "fmnist": Source(
        **_FMNIST,  # type: ignore[arg-type]
        train=60_000,
        test=10_000,
        note=_ZALANDO,
        formats=(
            Format(
                "IDX files",
                _idx_markers("fmnist", "FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "fashion_mnist"),
                formats.idx,
            ),
            Format("packed", _under(("", "fmnist"), "fashion_mnist.npz"), _packed),
            Format("IDX files (Debian)", _idx_markers("/usr/share/datasets/fashion-mnist"), formats.idx),
        ),
    ),
    "mnist": Source(
        classes=10,
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        mean=(0.1307,),
        std=(0.3081,),
        note="no licence stated; cite LeCun, Bottou, Bengio and Haffner 1998",
        formats=(Format("IDX files", _idx_markers("mnist", "MNIST/raw", "MNIST"), formats.idx),),
    ),
    "cifar10": Source(
        classes=10,
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        note=_KRIZHEVSKY,
        formats=_cifar(
            "cifar10",
            "cifar-10-batches-bin",
            "cifar-10-batches-py",
            ([f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]),
            1,
            "labels",
        ),
    ),
    "cifar100": Source(
        classes=100,
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        note=_KRIZHEVSKY,
        formats=_cifar("cifar100", "cifar-100-binary", "cifar-100-python", (["train"], ["test"]), 2, "fine_labels"),
    ),
    "cinic10": Source(
        classes=10,
        shape=(3, 32, 32),
        train=90_000,
        test=90_000,
        mean=(0.4789, 0.4723, 0.4305),
        std=(0.2421, 0.2383, 0.2587),
        note="train and test splits, valid unused; CC BY 4.0; cite Darlow, Crowley, Antoniou and Storkey 2018",
        formats=(
            Format("image files", _under(_CINIC, "train/airplane"), lambda path: formats.cinic(path.parents[1])),
            Format("official archive", _under(("", *_CINIC), "CINIC-10.tar.gz"), formats.cinic),
            Format(
                "packed sample of 2,000, not the dataset",
                _under(("", *_CINIC), "cinic10_sample2000.npz"),
                _cinic_sample,
                suffix="-sample",
            ),
        ),
    ),
}

NAMES = tuple(SOURCES)
"""The datasets known by name; `hf:NAME` and a user's own arrays come on top."""


def check_name(name: str) -> None:
    """Refuse a name that `load` can't know."""
    if name not in NAMES and name != "custom" and not name.startswith("hf:"):
        raise UserError(f"unknown dataset '{name}': {nearest(name, NAMES)}")


def find(name: str, folder: Path | None) -> tuple[Path, Format] | None:
    """Where a dataset lies and in which format, if it does."""
    if name == "digits":
        package = importlib.util.find_spec("sklearn")
        return (Path(str(package.origin)).parent, SOURCES[name].formats[0]) if package else None
    for form in SOURCES[name].formats:
        for path in _places(folder, form.markers):
            if path.exists():
                return path, form
    return None


def load(name: str, folder: Path | None = None) -> Dataset:
    """Read a dataset from `folder`, from where the system keeps it, or from the package itself."""
    check_name(name)
    if name.startswith("hf:"):
        return load_hf(name)
    if name == "custom":
        raise UserError("dataset = 'custom' has no files: pass the arrays in Python, with dynafed.data.from_arrays")
    found = find(name, folder)
    if found is None:
        raise UserError(_missing(name, folder))
    path, form = found
    source = SOURCES[name]
    train, test = form.read(path)
    dataset = from_arrays(train, test, name + form.suffix)
    if dataset.shape != source.shape or dataset.classes > source.classes:
        raise UserError(
            f"{path} has images of shape {dataset.shape} in {dataset.classes} classes, "
            f"but {name} has {source.shape} in {source.classes}: replace it"
        )
    return replace(dataset, classes=source.classes, mean=source.mean, std=source.std)


def describe(folder: Path | None) -> list[dict[str, Any]]:
    """What is known of every dataset, and whether it is here; plain values, for a table or JSON."""
    rows = []
    for name, source in SOURCES.items():
        found = find(name, folder)
        rows.append(
            {
                "name": name,
                "classes": source.classes,
                "shape": list(source.shape),
                "train": source.train,
                "test": source.test,
                "note": source.note,
                "found": found is not None,
                "where": str(found[0]) if found else None,
                "format": found[1].title if found else None,
            }
        )
    return rows


def _places(folder: Path | None, markers: tuple[str, ...]) -> Iterator[Path]:
    """Markers inside `folder`, whether it holds the dataset's own folder or is it.

    Never bare files: by their names alone, MNIST's could be FashionMNIST's.
    """
    bases = () if folder is None else (folder.absolute(), *folder.absolute().parents[:2])
    for marker in markers:
        if Path(marker).is_absolute():
            yield Path(marker)
        else:
            yield from (base / marker for base in bases if (base / marker).is_relative_to(bases[0]))


def _missing(name: str, folder: Path | None) -> str:
    if name == "digits":
        return "digits needs the package scikit-learn: pip install scikit-learn"
    where = f"in {folder}" if folder else "(no folder was given: set DYNAFED_DATA or data_dir)"
    return f"{name} was not found {where}: {by_hand(name, folder)}, or run: dynafed data fetch {name}"

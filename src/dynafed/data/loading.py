"""Finds, reads, lists and checks datasets."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynafed.data.arrays import Dataset, from_arrays, measure
from dynafed.data.download import manual_instructions
from dynafed.data.huggingface import load_hf
from dynafed.data.spec import DATASETS, DatasetSpec, Format, check_name, get_spec
from dynafed.errors import UserError
from dynafed.stages import stage


def find(spec: DatasetSpec, folder: Path | None) -> tuple[Path, Format] | None:
    """The path and format in which a dataset is present, or None."""
    for form in spec.formats:
        for path in _candidates(form, folder):
            if path.exists():
                return path, form
    return None


def load(name: str, folder: Path | None = None) -> Dataset:
    """Read a dataset from `folder`, from where the system keeps it, or from the package itself."""
    check_name(name)
    stage(f"loading {name}")
    if name.startswith("hf:"):
        return load_hf(name)
    if name == "custom":
        raise UserError("dataset = 'custom' has no files: pass the arrays in Python, with dynafed.data.from_arrays")
    part = DATASETS.load(name)
    if isinstance(part, DatasetSpec):
        return _read(name, part, folder)
    if not callable(part):
        raise UserError(f"dataset = '{name}' is {type(part).__name__}: it must be a DatasetSpec or a function")
    return _checked(name, part(folder))


def describe(folder: Path | None) -> list[dict[str, Any]]:
    """One row per dataset: what is known of it, and whether and where it is present; plain values."""
    return [_row(name, folder) for name in DATASETS.names()]


def check(name: str, folder: Path | None) -> dict[str, Any]:
    """Load a dataset and report on it, in plain values; `official` is None if no official checksum is known."""
    dataset = load(name, folder)
    spec = get_spec(name)
    found = find(spec, folder) if spec else None
    mean, std = measure(dataset.train_x)
    report = {
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
        "official": None,
    }
    if spec and spec.checksums and dataset.name == spec.name:
        train, test = dataset.train_x.numpy(), dataset.test_x.numpy()
        splits = (train, dataset.train_y.numpy()), (test, dataset.test_y.numpy())
        report["official"] = spec.checksums.match(splits)
    return report


def _read(name: str, spec: DatasetSpec, folder: Path | None) -> Dataset:
    found = find(spec, folder)
    if found is None:
        raise UserError(_missing(name, spec, folder))
    path, form = found
    train, test = form.read(path, spec.max_bytes)
    dataset = from_arrays(train, test, spec.name + form.suffix, renumber=False)
    if dataset.shape != spec.shape or dataset.classes > spec.classes:
        raise UserError(
            f"{path} has samples of shape {dataset.shape} in {dataset.classes} classes, "
            f"but {spec.name} has {spec.shape} in {spec.classes}: replace it"
        )
    return _described(dataset, spec)


def _checked(name: str, made: Any) -> Dataset:
    """What another package's function returned, as a dataset of valid arrays."""
    if not isinstance(made, Dataset):
        if not (isinstance(made, tuple | list) and len(made) == 2):
            raise UserError(
                f"dataset = '{name}' returned {type(made).__name__}: return a Dataset, or the arrays "
                "((train_x, train_y), (test_x, test_y))"
            )
        return from_arrays(made[0], made[1], name)
    pairs = (made.train_x, made.train_y), (made.test_x, made.test_y)
    valid = replace(from_arrays(*pairs, made.name, renumber=False), labels=made.labels)
    if made.classes < valid.classes or len(made.class_names) not in (0, made.classes):
        raise UserError(
            f"dataset = '{name}' has labels up to {valid.classes - 1}, classes = {made.classes} and "
            f"{len(made.class_names)} class names: make them agree"
        )
    return _described(valid, made)


def _described(dataset: Dataset, by: Dataset | DatasetSpec) -> Dataset:
    """These arrays with the classes and the normalization of `by`; mean and std stay as measured if it has none."""
    mean, std = by.mean or dataset.mean, by.std or dataset.std
    return replace(dataset, classes=by.classes, class_names=by.class_names, mean=mean, std=std)


def _row(name: str, folder: Path | None) -> dict[str, Any]:
    row = dict.fromkeys(("name", "classes", "shape", "train", "test", "note", "found", "where", "format"))
    try:
        part = DATASETS.load(name)
    except UserError as error:  # another package's, which must not hide the others
        return row | {"name": name, "note": str(error), "found": False}
    if not isinstance(part, DatasetSpec):
        note = (getattr(part, "__doc__", None) or "").partition("\n")[0]
        where = f"{getattr(part, '__module__', '?')}.{getattr(part, '__qualname__', '?')}"
        return row | {"name": name, "note": note, "found": True, "where": where, "format": "function"}
    found = find(part, folder)
    train, test = (found[1].sizes if found else None) or (part.train, part.test)
    return {
        "name": name,
        "classes": part.classes,
        "shape": list(part.shape),
        "train": train,
        "test": test,
        "note": part.summary,
        "found": found is not None,
        "where": str(found[0]) if found else None,
        "format": found[1].title if found else None,
    }


def _candidates(form: Format, folder: Path | None) -> Iterator[Path]:
    """The format's module, or its markers inside `folder`, which holds the dataset's own folder or is it.

    Never bare files: by their names alone, MNIST's could be FashionMNIST's.
    """
    if form.module and (module := importlib.util.find_spec(form.module)):
        yield Path(str(module.origin)).parent
    bases = () if folder is None else (folder.absolute(), *folder.absolute().parents[:2])
    for marker in form.markers:
        if Path(marker).is_absolute():
            yield Path(marker)
        else:
            yield from (base / marker for base in bases if (base / marker).is_relative_to(bases[0]))


def _missing(name: str, spec: DatasetSpec, folder: Path | None) -> str:
    if modules := [form for form in spec.formats if form.module]:
        return f"{name} needs the package {modules[0].title}: pip install {modules[0].title}"
    where = f"in {folder}" if folder else "(no folder was given: set DYNAFED_DATA or data_dir)"
    fetch = f", or run: dynafed data fetch {name}" if spec.download else ""
    return f"{name} was not found {where}: {manual_instructions(spec, folder)}{fetch}"


def _sha256(dataset: Dataset) -> str:
    hasher = hashlib.sha256()
    for tensor in (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y):
        array = np.ascontiguousarray(tensor)
        hasher.update(f"{array.dtype.str}{array.shape}".encode())
        hasher.update(array.data)
    return hasher.hexdigest()

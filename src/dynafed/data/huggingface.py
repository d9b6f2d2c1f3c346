"""Datasets of the `datasets` library, from the hub or from disk: `hf:NAME[:COLUMN[:LABEL]]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynafed.data.arrays import Dataset, from_arrays
from dynafed.data.formats import Array
from dynafed.data.images import stack_images
from dynafed.errors import UserError


def load_hf(name: str) -> Dataset:
    """The dataset that `hf:PATH_OR_NAME[:image_column[:label_column]]` names."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{name} needs the package 'datasets': pip install 'dynafed[hf]'") from None
    path, x_name, y_name = [*name.removeprefix("hf:").split(":"), "", ""][:3]
    try:
        on_disk = (Path(path) / "dataset_dict.json").exists() or (Path(path) / "state.json").exists()
        splits = datasets.load_from_disk(path) if on_disk else datasets.load_dataset(path)
    except Exception as error:  # the library raises whatever its readers and its network code do
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"'{path}' could not be loaded with the package 'datasets': {reason}") from error
    if not isinstance(splits, dict):
        raise UserError(f"{name} has only one split: save it as a DatasetDict with train and test")
    test = next((split for split in ("test", "validation") if split in splits), None)
    if "train" not in splits or test is None:
        raise UserError(f"{name} has the splits {', '.join(splits)}: it needs train, and test or validation")
    label = _label_column(name, splits["train"], y_name, datasets)
    columns = _sample_columns(name, splits["train"], x_name, label, datasets)
    pairs = [(_samples(name, splits[split], columns), np.asarray(splits[split][label])) for split in ("train", test)]
    class_names = tuple(getattr(splits["train"].features[label], "names", ()))
    dataset = from_arrays(pairs[0], pairs[1], name, renumber=not class_names)
    if len(class_names) < dataset.classes:  # no names, or labels that have none
        return dataset
    return dataclasses.replace(dataset, classes=len(class_names), class_names=class_names)


def read_split(split: Any, target: str, columns: Sequence[str], where: str) -> tuple[Array, Array]:
    """Samples and labels of one split, such as a client's own dataset."""
    import datasets

    label = _label_column(where, split, target, datasets)
    if columns:
        names = [_known(where, split, column, "sample") for column in columns]
    else:
        names = _sample_columns(where, split, "", label, datasets)
    return _samples(where, split, names), np.asarray(split[label])


def _label_column(name: str, split: Any, given: str, datasets: Any) -> str:
    named = [column for column, kind in split.features.items() if isinstance(kind, datasets.ClassLabel)]
    usual = [column for column in ("label", "labels") if column in split.features]
    return _known(name, split, given or next(iter(usual + named), ""), "label")


def _sample_columns(name: str, split: Any, given: str, label: str, datasets: Any) -> list[str]:
    if given:
        return [_known(name, split, given, "sample")]
    images = [column for column, kind in split.features.items() if isinstance(kind, datasets.Image)]
    numbers = [
        column
        for column, kind in split.features.items()
        if column != label and isinstance(kind, datasets.Value) and kind.dtype.startswith(("int", "uint", "float"))
    ]
    lists = [column for column, kind in split.features.items() if column != label and hasattr(kind, "feature")]
    return images[:1] or numbers or lists[:1] or [_known(name, split, "", "sample")]


def _known(name: str, split: Any, column: str, role: str) -> str:
    if column not in split.features:
        raise UserError(
            f"{name} has no {role} column '{column}' among {', '.join(split.features)}: name it as hf:NAME:COLUMN:LABEL"
        )
    return column


def _samples(name: str, split: Any, columns: list[str]) -> Array:
    values = list(split[columns[0]])
    if not hasattr(values[0], "convert"):
        rows = [np.asarray(split[column]) for column in columns]
        return rows[0] if rows[0].ndim > 1 else np.column_stack(rows).astype(np.float32)
    return stack_images(values, name)

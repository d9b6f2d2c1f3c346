"""What is learned: classes by any label, several labels at once, or numbers; as they were given, and as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynafed.errors import UserError

Label = int | str

SHOWN = 8
"""Labels that an error names."""


def label_array(y: Any, where: str) -> np.ndarray:
    """Labels as they were given: a flat array of whole numbers or of texts."""
    array = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if array.dtype.kind == "O" and all(isinstance(value, str) for value in array.flat):
        array = array.astype(str)
    if array.dtype.kind not in "iuUT" or array.ndim != 1:
        kind = f"{array.dtype}" + (f" of shape {array.shape}" if array.ndim != 1 else "")
        raise UserError(f"{where} y is {kind}: labels must be whole numbers or texts, one for each sample")
    return array


def find_classes(found: Iterable[np.ndarray], where: str, *, renumber: bool = True) -> tuple[int, tuple[Label, ...]]:
    """The number of classes among these labels, and the label of each class; no labels if they count from 0.

    Whole numbers count up to the largest. Texts are sorted, and those that occur count. With `renumber` False, labels
    must be whole numbers from 0.
    """
    distinct = [np.unique(labels) for labels in found]
    if len({labels.dtype.kind in "UT" for labels in distinct}) > 1:
        raise UserError(f"{where} has labels that are texts and labels that are numbers: make them alike")
    values: list[Label] = np.unique(np.concatenate(distinct)).tolist()
    if isinstance(values[0], str) and renumber:
        return len(values), tuple(values)
    least, most = values[0], values[-1]
    if isinstance(least, str) or isinstance(most, str) or least < 0:
        raise UserError(f"{where} has the label {least}: labels must be whole numbers from 0 or from 1, or texts")
    if most + 1 > 1000 + 10 * len(values):
        raise UserError(
            f"labels go up to {most}, but only {len(values)} of them occur: number them from 0, for instance with "
            "np.unique(y, return_inverse=True)"
        )
    return (most, tuple(range(1, most + 1))) if least == 1 and renumber else (most + 1, ())


def settle_classes(
    classes: int | Sequence[Any] | None, found: Iterable[np.ndarray], where: str
) -> tuple[int, tuple[Label, ...]]:
    """The same, if the user may have said how many `classes` there are, or their labels in order."""
    if classes is None:
        return find_classes(found, where)
    if not isinstance(classes, int):
        given = tuple(value.item() if isinstance(value, np.generic) else value for value in classes)
        if len(given) < 2 or len(set(given)) < len(given) or not all(isinstance(label, Label) for label in given):
            raise UserError(f"classes = {list(given)!r} must be a number, or at least two different labels")
        return len(given), given
    number, labels = find_classes(found, where)
    if labels and isinstance(labels[0], str) and number != classes:
        raise UserError(f"{where} has {number} different labels, but classes = {classes}: give the labels in order")
    return classes, labels if number == classes else ()


def encode_labels(y: np.ndarray, classes: int, labels: Sequence[Label], where: str) -> Tensor:
    """Labels as class numbers from 0, int64."""
    if not labels:
        if y.dtype.kind in "UT":
            raise UserError(f"{where} has the label '{y[0]}', but classes = {classes} counts from 0: give the labels")
        wrong = y[(y < 0) | (y >= classes)]
        if len(wrong):
            raise UserError(f"{where} has the label {wrong[0]}: the {classes} classes go from 0 to {classes - 1}")
        return torch.from_numpy(y.astype(np.int64))
    known = np.array(labels)
    if known.dtype.kind in "UT" and y.dtype.kind not in "UT":
        y = y.astype(str)
    elif known.dtype.kind not in "UT" and y.dtype.kind in "UT":
        known = known.astype(str)
    order = np.argsort(known)
    place = np.searchsorted(known, y, sorter=order).clip(max=len(known) - 1)
    wrong = y[known[order[place]] != y]
    if len(wrong):
        shown = ", ".join(str(label) for label in labels[:SHOWN]) + (", ..." if len(labels) > SHOWN else "")
        raise UserError(f"{where} has the label {wrong[0]!s}, which is none of the {len(labels)} classes {shown}")
    return torch.from_numpy(order[place].astype(np.int64))


def decode_labels(numbers: Tensor, labels: Sequence[Label]) -> np.ndarray:
    """Class numbers as the labels that were given."""
    found = numbers.cpu().numpy()
    return np.array(labels)[found] if labels else found


def target_kind(y: Any) -> str:
    """What the targets of a loss of the user's own are: one label a sample makes "classes", all else "numbers"."""
    array = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    return "classes" if array.ndim == 1 and array.dtype.kind in "iuUTO" else "numbers"


def number_targets(y: Any, shape: tuple[int, int] | None, kind: str, where: str) -> Tensor:
    """Several labels or numbers for each sample, float32 (N, K); refused if they aren't of this `shape`."""
    try:
        found = torch.as_tensor(np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y, np.float32))
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} y must be numbers for this loss: {error}") from None
    found = found[:, None] if found.ndim == 1 else found
    if found.ndim != 2 or (shape is not None and tuple(found.shape) != shape):
        wanted = f"{shape[0]} rows of {shape[1]}" if shape else "a row for each sample"
        raise UserError(f"{where} y has shape {tuple(np.shape(y))}: it must be {wanted}")
    if not found.isfinite().all():
        raise UserError(f"{where} y has values that are infinite or not a number: clean them first")
    if kind == "labels" and ((found < 0) | (found > 1)).any():
        raise UserError(f"{where} y has the value {float(found.max()):g}: with loss = 'bce', each label is 0 or 1")
    return found

"""What nodes with data of their own say about it before round 1, and what follows for all: the samples' schema.

No sample is in a declaration, and no node is believed: a declaration is bounded, and a node that doesn't fit the others
is left out. Once a run has a schema, it never changes, whatever other nodes declare.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict

from dynafed.data.own import add_classes, make_layout
from dynafed.data.readers import Raw
from dynafed.data.schema import Schema, sample_tensor
from dynafed.data.settings import DataSettings
from dynafed.data.targets import label_array, number_targets, target_kind
from dynafed.errors import UserError
from dynafed.flower.wire import MAX_SAMPLES

T = TypeVar("T")

DTYPES = ("uint8", "float32", "int64")

MAX_DIMENSIONS, MAX_VALUES = 8, 2**28
"""Of one sample."""
MAX_LABELS, MAX_LABEL_LENGTH = 10_000, 200
"""Different labels of a node, and characters of one."""
MAX_CLIENTS = 100_000
"""Of a node."""


@dataclass(frozen=True)
class Declaration:
    """What a node's samples look like."""

    shape: tuple[int, ...]
    dtype: str
    labels: np.ndarray
    """Those that occur, as they are, each one once; empty if there are no classes."""
    sizes: tuple[int, ...]
    """How many samples each of its clients has."""
    targets: str = "classes"
    """What is learned, as a `Schema` says it."""
    outputs: int = 0
    """How many labels or numbers a sample has, if there are no classes."""
    columns: tuple[str, ...] = ()
    """The columns that are learned from, in their order, if the samples are a table's."""

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)

    @property
    def learned(self) -> str:
        """What is learned, in words."""
        return "classes" if self.targets == "classes" else f"{self.outputs} {self.targets}"

    @property
    def texts(self) -> bool:
        """Whether the labels are texts."""
        return self.labels.dtype.kind in "UT"


def describe(dtype: str, shape: Sequence[int]) -> str:
    """A layout in words."""
    return f"{dtype} of shape {tuple(shape)}"


def declare(raw: Mapping[str, Raw], targets: str | None, columns: tuple[str, ...] = ()) -> Declaration:
    """What a node declares, given its clients' samples under a title for each; refused if they are nothing alike.

    Without `targets`, the samples tell what is learned.
    """
    kinds: dict[tuple[str, tuple[int, ...], str, int], str] = {}
    labels, sizes = [np.empty(0, np.int64)], []
    for where, (x, y) in raw.items():
        samples, kind, outputs = sample_tensor(x, where), targets or target_kind(y), 0
        if kind == "classes":
            found = label_array(y, where)
            labels.append(np.unique(found))
        else:
            found = number_targets(y, None, kind, where).numpy()
            outputs = found.shape[1]
        if len(found) != len(samples):
            raise UserError(f"{where} has {len(found)} labels for {len(samples)} samples: give one label for each")
        kinds[str(samples.dtype).removeprefix("torch."), tuple(samples.shape[1:]), kind, outputs] = where
        sizes.append(len(samples))
    if len(kinds) > 1:
        said = "; ".join(f"{where} has {describe(*kind[:2])}" for kind, where in kinds.items())
        raise UserError(f"its clients' samples are nothing alike: {said}")
    ((dtype, shape, kind, outputs),) = kinds
    distinct = np.unique(np.concatenate(labels[1:] or labels))
    return Declaration(shape, dtype, distinct, tuple(sizes), kind, outputs, columns)


def write_declaration(declaration: Declaration) -> ConfigRecord:
    """A declaration as Flower sends it."""
    return ConfigRecord(
        {
            "shape": list(declaration.shape),
            "dtype": declaration.dtype,
            "labels": declaration.labels.tolist(),
            "sizes": list(declaration.sizes),
            "targets": declaration.targets,
            "outputs": declaration.outputs,
            "columns": list(declaration.columns),
        }
    )


def read_declaration(content: RecordDict) -> Declaration:
    """The inverse of `write_declaration`; raises any exception if the node sent something else, or too much of it."""
    record = content.config_records["declaration"]
    shape, dtype, labels, sizes = (record[name] for name in ("shape", "dtype", "labels", "sizes"))
    targets, outputs, columns = record["targets"], record["outputs"], record["columns"]
    if not (_whole_numbers(shape, MAX_DIMENSIONS) and min(shape) > 0 and math.prod(shape) <= MAX_VALUES):
        raise UserError(f"its samples' shape is none that can be: {str(shape)[:100]}")
    if dtype not in DTYPES:
        raise UserError(f"its samples are of a type that can't be: {str(dtype)[:100]}")
    if not (_whole_numbers(sizes, MAX_CLIENTS) and min(sizes) > 0 and max(sizes) <= MAX_SAMPLES):
        raise UserError("its numbers of samples can't be")
    if not (_texts(columns) or columns == []):
        raise UserError(f"its columns must have short names, at most {MAX_LABELS} of them")
    names = tuple(map(str, columns))
    if targets == "classes":
        if not (_whole_numbers(labels, MAX_LABELS) or _texts(labels)):
            raise UserError(f"its labels must be whole numbers or short texts, at most {MAX_LABELS} different ones")
        return Declaration(tuple(shape), str(dtype), np.unique(np.array(labels)), tuple(sizes), columns=names)
    if targets not in ("labels", "numbers") or type(outputs) is not int or not 0 < outputs <= MAX_LABELS:
        raise UserError("what it has to learn can't be")
    return Declaration(tuple(shape), str(dtype), np.empty(0), tuple(sizes), str(targets), outputs, names)


def _whole_numbers(values: object, most: int) -> TypeGuard[list[int]]:
    """Whether it is a list of at most so many whole numbers, and not empty. A bool is none, though an int."""
    return (
        isinstance(values, list)
        and 0 < len(values) <= most
        and all(type(each) is int and abs(each) < 2**62 for each in values)
    )


def _texts(values: object) -> TypeGuard[list[str]]:
    """Whether it is a list of short texts that can be printed, not too long and not empty."""
    return (
        isinstance(values, list)
        and 0 < len(values) <= MAX_LABELS
        and all(isinstance(each, str) and len(each) <= MAX_LABEL_LENGTH and each.isprintable() for each in values)
    )


def agree(
    declared: Mapping[int, Declaration], given: DataSettings, held: Sequence[np.ndarray], integers: bool
) -> tuple[Schema, dict[int, str]]:
    """The schema of a run, and each node that doesn't fit, with the reason.

    What the config gives counts. All else is what most nodes declare, and the classes are all that occur, `held`, the
    labels of the server's own samples, included. Raises `UserError` if there is no majority.
    """
    shape, dtype = _majority(declared, given)
    layout = make_layout(getattr(torch, dtype), shape, given, "nodes", integers)
    fits_dtype = {dtype, str(layout.dtype).removeprefix("torch."), "int64" if layout.dtype == torch.float32 else dtype}
    odd = {
        node: f"its samples are {each}, those of the run {describe(dtype, shape)}"
        for node, each in declared.items()
        if each.shape != shape or each.dtype not in fits_dtype
    }
    fitting = {node: each for node, each in declared.items() if node not in odd}
    learned = _most_common(
        [each.learned for each in fitting.values() or declared.values()], "they don't learn the same"
    )
    odd |= {
        node: f"it has {each.learned} to learn, the others {learned}"
        for node, each in fitting.items()
        if each.learned != learned
    }
    fitting = {node: each for node, each in fitting.items() if node not in odd}
    if learned != "classes":
        one = next((each for each in fitting.values()), Declaration((), "", np.empty(0), (), "numbers", 1))
        return replace(layout, targets=one.targets, classes=one.outputs, flat=one.outputs == 1), odd
    if not given.labels and fitting:
        texts = _most_common([each.texts for each in fitting.values()], "some labels are texts, some are numbers")
        kind = "texts" if texts else "whole numbers"
        odd |= {
            node: f"its labels are not {kind}, as those of the others"
            for node, each in fitting.items()
            if each.texts != texts
        }
    while True:
        fitting = {node: each for node, each in declared.items() if node not in odd}
        if not fitting:
            return layout, odd
        try:
            schema = add_classes(layout, given, [*(each.labels for each in fitting.values()), *held])
            break
        except UserError as error:
            if any(each.texts for each in fitting.values()):
                raise
            # Whoever has the label that is farthest out is to blame; if it is nobody's, the server's own samples are.
            worst = max(fitting, key=lambda node: _farthest(fitting[node].labels))
            if held and len(fitting) == 1:
                raise
            odd[worst] = str(error)
    for node, each in fitting.items():
        try:
            schema.stored_y(each.labels, len(each.labels), "its data")
        except UserError as error:
            odd[node] = str(error)
    return schema, odd


def _farthest(labels: np.ndarray) -> tuple[int, int]:
    """How far out labels are: below 0 first, then the largest."""
    return max(0, -int(labels[0])), int(labels[-1])


def agree_on_columns(
    declared: Mapping[int, Declaration], given: DataSettings
) -> tuple[tuple[str, ...], dict[int, str]]:
    """The columns that are learned from, and each node that has others, with the reason; none if there are no tables.

    Those that the config gives count, else those of most nodes, in the order of the first of them.
    """
    tables = {node: each.columns for node, each in declared.items() if each.columns}
    if not tables:
        return given.columns, {}
    common = _most_common([frozenset(names) for names in tables.values()], "their tables' columns differ")
    columns = given.columns or next(names for names in tables.values() if common == frozenset(names))
    odd = {}
    for node, names in tables.items():
        if different := sorted(frozenset(columns) ^ frozenset(names)):
            odd[node] = f"its columns are others than those of the run, such as '{different[0]}'"
    return columns, odd


def _majority(declared: Mapping[int, Declaration], given: DataSettings) -> tuple[tuple[int, ...], str]:
    """Shape and type that count: those given, else those of most nodes."""
    kinds = [(given.shape or each.shape, given.dtype or each.dtype) for each in declared.values()]
    # Whole numbers fit into a run of floats, too.
    floats = {shape for shape, dtype in kinds if dtype == "float32"}
    kinds = [(shape, "float32" if dtype == "int64" and shape in floats else dtype) for shape, dtype in kinds]
    distinct = " and ".join(describe(dtype, shape) for shape, dtype in sorted(set(kinds)))
    return _most_common(kinds, f"their samples are {distinct}")


def _most_common(values: Sequence[T], difference: str) -> T:
    ranked = Counter(values).most_common(2)
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        raise UserError(
            f"as many nodes say one thing as another: {difference}; say what counts with data.shape, data.dtype, "
            "data.labels and data.columns in the server's config"
        )
    return ranked[0][0]

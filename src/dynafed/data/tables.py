"""Tables, column by column: CSV and Parquet files, DataFrames; a column is the target, the others are the samples."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynafed.errors import UserError, first_line

Table = Mapping[str, np.ndarray]

TARGETS = ("label", "labels", "target", "y")
"""What a target column is called if nobody says it."""


def read_csv(path: Path) -> Table:
    """A CSV file whose first line names the columns; a column is whole numbers, numbers or texts."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            names = next(reader, [])
            rows = [row for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} can't be read as CSV: {first_line(error)}") from None
    if not rows or len(set(names)) < len(names):
        raise UserError(f"{path} needs a first line of different column names and a row for each sample")
    if (wrong := next((number for number, row in enumerate(rows, 2) if len(row) != len(names)), None)) is not None:
        raise UserError(f"{path}, row {wrong}, has {len(rows[wrong - 2])} values for {len(names)} columns")
    return {name: _typed(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}


def read_parquet(path: Path) -> Table:
    """A Parquet file; a column of lists becomes rows of an array."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path} needs the package 'pyarrow': pip install pyarrow") from None
    try:
        table = parquet.read_table(path)
    except Exception as error:  # pyarrow's readers raise errors of many kinds
        raise UserError(f"{path} can't be read as Parquet: {first_line(error)}") from None
    return {name: table[name].to_numpy() for name in table.column_names}


def from_frame(frame: Any) -> Table:
    """The columns of a DataFrame."""
    return {str(name): np.asarray(frame[name]) for name in frame.columns}


def target_column(names: Sequence[str], target: str, where: str) -> str:
    """The column that is to be learned: the one that was named, else one with a usual name."""
    found = [target] if target else [name for name in names if name.lower() in TARGETS]
    if len(found) != 1 or found[0] not in names:
        raise UserError(
            f"{where} has {f'no column {target!r}' if target else 'no target column that can be told'} among "
            f"{', '.join(names)}: name it as target= (in a config: data.target)"
        )
    return found[0]


def from_table(
    table: Table, target: str, columns: Sequence[str], leave: Sequence[str], where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Samples and targets: `columns`, else all but the target and those to `leave`."""
    names = feature_columns(table, target, columns, leave, where)
    return table_samples(table, names, where), _stacked(table[target_column(list(table), target, where)])


def feature_columns(
    table: Table, target: str, columns: Sequence[str], leave: Sequence[str], where: str
) -> Sequence[str]:
    """The columns that are learned from."""
    label = target_column(list(table), target, where)
    names = list(columns) or [name for name in table if name != label and name not in leave]
    if not names:
        raise UserError(f"{where} has no column but its target, '{label}'")
    return names


def table_samples(table: Table, names: Sequence[str], where: str) -> np.ndarray:
    """These columns as samples: numbers become rows of float32, a single column of arrays keeps its type."""
    if missing := [name for name in names if name not in table]:
        raise UserError(f"{where} has no column '{missing[0]}' among {', '.join(table)}: see data.columns")
    arrays = [_stacked(table[name]) for name in names]
    for name, array in zip(names, arrays, strict=True):
        if array.dtype.kind not in "iufb":
            raise UserError(
                f"{where}: the column '{name}' holds {array.dtype.name} values, such as {array.flat[0]!r}: make it "
                "numbers, or leave it out with data.columns"
            )
    return arrays[0] if len(arrays) == 1 and arrays[0].ndim > 1 else np.column_stack(arrays).astype(np.float32)


def _stacked(column: np.ndarray) -> np.ndarray:
    """A column of equally long lists as one array; others as they are."""
    if column.dtype.kind == "O" and len(column) and not isinstance(column[0], str | bytes) and np.ndim(column[0]):
        try:
            return np.stack([np.asarray(value) for value in column])
        except ValueError:
            raise UserError("a column holds lists of different lengths: pad them to one length") from None
    return column


def _typed(values: Sequence[str]) -> np.ndarray:
    array = np.array(values)
    for kind in (np.int64, np.float64):
        try:
            return array.astype(kind)
        except (ValueError, OverflowError):
            pass
    return array

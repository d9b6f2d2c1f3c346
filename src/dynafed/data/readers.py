"""The samples of one client, from whatever somebody has: arrays, a dataset, a table, a file, a folder, a function."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynafed.data.formats import npz_arrays
from dynafed.data.huggingface import read_split
from dynafed.data.images import class_folders, read_image_folder
from dynafed.data.tables import Table, from_frame, from_table, read_csv, read_parquet
from dynafed.errors import UserError, first_line

TABLES: Mapping[str, Callable[[Path], Table]] = {".csv": read_csv, ".parquet": read_parquet}

FILES = (".npz", *TABLES)
"""The kinds of files that hold samples."""

Raw = tuple[Any, Any]
"""Samples and targets as they were given: arrays, tensors or lists."""


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are meant."""

    target: str = ""
    """What is to be learned; empty: the one with a usual name."""
    samples: tuple[str, ...] = ()
    """What is learned from; empty: all others."""
    client: str = ""
    """Whose row it is; never learned from."""


def is_lazy(source: Any) -> bool:
    """Whether it takes reading to know what a source holds."""
    return callable(source) or isinstance(source, str | Path)


def read(source: Any, columns: Columns, where: str) -> Raw:
    """The samples and targets of a source. Raises `UserError`, which names `where`, if it has none."""
    if callable(source):
        try:
            source = source()
        except UserError:
            raise
        except Exception as error:  # it is the user's code: whatever it raises is what they need to know
            raise UserError(f"{where}: its function failed: {type(error).__name__}: {first_line(error)}") from error
    if isinstance(source, str | Path):
        return read_path(Path(source), columns)
    if isinstance(source, tuple | list) and len(source) == 2:
        return source[0], source[1]
    if hasattr(source, "column_names") and hasattr(source, "features"):
        return read_split(source, columns.target, columns.samples, where)
    if hasattr(source, "columns") and hasattr(source, "__getitem__"):
        return from_table(from_frame(source), columns.target, columns.samples, (columns.client,), where)
    if isinstance(source, torch.utils.data.Dataset):
        return _from_dataset(source, where)
    raise UserError(
        f"{where} is a {type(source).__name__}: give (x, y), a torch Dataset, a Hugging Face dataset, a DataFrame, a "
        "path, or a function that returns one of these"
    )


def read_path(path: Path, columns: Columns) -> Raw:
    """The samples of a file, or of a folder with images in a sub-folder for each class."""
    if path.is_dir():
        return read_image_folder(path)
    if not path.is_file():
        raise UserError(f"{path} is neither a file nor a folder")
    if path.suffix == ".npz":
        try:
            x, y = npz_arrays(path, ("x", "y"))
        except (KeyError, zipfile.BadZipFile, ValueError, OSError) as error:
            raise UserError(f"{path} must be an .npz file with the arrays x and y: {first_line(error)}") from None
        return x, y
    return from_table(read_table(path), columns.target, columns.samples, (columns.client,), str(path))


def read_table(path: Path) -> Table:
    """The columns of a CSV or Parquet file."""
    if path.suffix not in TABLES:
        raise UserError(f"{path} is no file that can be read: {', '.join(FILES)}, or a folder of images by class")
    return TABLES[path.suffix](path)


def is_client_path(path: Path) -> bool:
    """Whether a path can be one client's data, by its name and what is in it."""
    return path.suffix in FILES if path.is_file() else path.is_dir() and bool(class_folders(path))


def _from_dataset(source: torch.utils.data.Dataset[Any], where: str) -> Raw:
    """The items (x, y) of a torch dataset, stacked."""
    if isinstance(source, torch.utils.data.TensorDataset) and len(source.tensors) == 2:
        return source.tensors[0], source.tensors[1]
    try:
        items = [source[index] for index in range(len(source))]  # type: ignore[arg-type]
        samples, targets = zip(*((item[0], item[1]) for item in items), strict=True)
        return _stack(samples), _stack(targets)
    except Exception as error:  # it is the user's code: whatever it raises is what they need to know
        raise UserError(f"{where}: its dataset must have a length and items (x, y): {first_line(error)}") from error


def _stack(values: Sequence[Any]) -> Any:
    return torch.stack(list(values)) if isinstance(values[0], Tensor) else np.array(values)

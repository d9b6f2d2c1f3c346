"""The clients of a config's section `data`: one file or sub-folder each, or a column that says whose row it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynafed.data.formats import npz_arrays
from dynafed.data.readers import FILES, TABLES, Columns, is_client_path, read_table
from dynafed.data.settings import DataSettings
from dynafed.data.tables import Table, feature_columns, from_frame, from_table, table_samples
from dynafed.errors import UserError, first_line


def find_path(path: str, data_dir: str, folder: Path | None) -> Path:
    """Where a path of the section is: in the folder that `data_dir` names, else here, else in `folder`."""
    bases = [Path(data_dir)] if data_dir else [Path.cwd(), *([folder] if folder else [])]
    found = next((base / Path(path).expanduser() for base in bases if (base / Path(path).expanduser()).exists()), None)
    if found is None:
        raise UserError(f"{path} is neither here nor in the data folder: give its path (data.path, data_dir)")
    return found.absolute()


def file_clients(path: Path, settings: DataSettings, leave: Sequence[Path] = ()) -> dict[str, Any]:
    """The source of each client, by name, in the order of the names; `leave` are files of the server's."""
    if path.is_dir():
        return _in_folder(path, leave)
    if not settings.client:
        raise UserError(f"data.path = {path} is one file: say with data.client which column tells whose row it is")
    return _by_column(path, settings.client, settings.table_columns())


def _in_folder(folder: Path, leave: Sequence[Path]) -> dict[str, Any]:
    paths = [path for path in sorted(folder.iterdir()) if path not in leave and is_client_path(path)]
    names = [path.stem if path.is_file() else path.name for path in paths]
    if not paths:
        raise UserError(
            f"{folder} has no clients: a file ({', '.join(FILES)}) for each, or a sub-folder with images by class"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []:
        raise UserError(f"{folder} has two clients called '{twice[0]}': rename one")
    return dict(zip(names, paths, strict=True))


def _by_column(path: Path, client: str, columns: Columns) -> dict[str, Any]:
    """The rows of one file, divided by the client that they name."""
    if path.suffix == ".npz":
        try:
            x, y, whose = npz_arrays(path, ("x", "y", client))
        except Exception as error:  # a damaged file can fail in every way that its decoder knows
            raise UserError(f"{path} must have the arrays x, y and {client}: {first_line(error)}") from None
    else:
        table = read_table(path)
        if client not in table:
            raise UserError(f"{path} has no column '{client}' among {', '.join(table)}: see data.client")
        (x, y), whose = from_table(table, columns.target, columns.samples, (client,), str(path)), table[client]
    names, numbers = np.unique(whose.astype(str), return_inverse=True)
    if len(numbers) != len(x):
        raise UserError(f"{path} has {len(numbers)} values of '{client}' for {len(x)} samples")
    rows = np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))[:-1])
    return {str(name): (x[own], y[own]) for name, own in zip(names, rows, strict=True)}


def table_of(source: Any) -> Table | None:
    """The columns of a source that is a table: a file or a DataFrame."""
    if isinstance(source, str | Path):
        return read_table(Path(source)) if Path(source).suffix in TABLES else None
    if hasattr(source, "columns") and hasattr(source, "__getitem__") and not hasattr(source, "column_names"):
        return from_frame(source)
    return None


def pinned_columns(source: Any, columns: Columns) -> tuple[str, ...]:
    """The names of the columns that are learned from, in order, if the source is a table; else none."""
    table = table_of(source)
    if table is None:
        return ()
    return tuple(feature_columns(table, columns.target, columns.samples, (columns.client,), "the first table"))


def samples_only(path: Path, names: Sequence[str]) -> Any:
    """The samples of a file, whose targets needn't be there."""
    if path.suffix == ".npz":
        try:
            return npz_arrays(path, ("x",))[0]
        except Exception as error:  # a damaged file can fail in every way that its decoder knows
            raise UserError(f"{path} must be an .npz file with the array x: {first_line(error)}") from None
    table = read_table(path)
    return table_samples(table, list(names) or list(table), str(path))

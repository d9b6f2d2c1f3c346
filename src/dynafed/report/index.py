"""A page that lists runs, with links to their own pages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dynafed.engine.files import write_bytes
from dynafed.report.blocks import sortable_table
from dynafed.report.page import Page
from dynafed.report.text import escape, plural
from dynafed.runs import Row, text


def write_index(rows: Sequence[Row], columns: Sequence[str], file: Path) -> Path:
    """Write the page of these runs, a row for each; returns the file."""
    page = Page(f"{plural(len(rows), 'run')} · dynafed", file.parent)
    page.add(
        f'<header><p class="eyebrow">dynafed · {escape(file.parent.resolve().name)}</p>'
        f"<h1>{plural(len(rows), 'run')}</h1></header>"
    )
    numeric = [all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns]
    table = sortable_table(
        [(escape(column), is_numeric) for column, is_numeric in zip(columns, numeric, strict=True)],
        [[_cell(row, column, file.parent) for column in columns] for row in rows],
        label="runs",
    )
    page.section("Runs", table)
    write_bytes(file, page.html().encode())
    return file


def _cell(row: Row, column: str, base: Path) -> tuple[str, Any]:
    """The HTML of a cell, and what it is sorted by."""
    shown, value = escape(text(row, column)), row.get(column)
    if column != "run":
        return shown, value
    folder = Path(row["run"])
    name = escape(os.path.relpath(folder.resolve(), base.resolve()))
    if not (folder / "report.html").is_file():
        return name, value
    link = quote(os.path.relpath((folder / "report.html").resolve(), base.resolve()))
    return f'<a href="{link}">{name}</a>', value

"""Blocks of `report.json`: any module may write that file into a run folder, and the page shows what it holds.

`report.json` is a list of blocks `{"title": ..., "text": ..., "kind": ..., "data": ...}`; `text` may be left out, and a
block without `kind` is text alone. By kind, `data` is

- `images`: `{"images": [{"src": ..., "caption": ...}]}`. `src` is a data URI (png, jpeg, gif or webp, base64) or the
  path of a PNG inside the run folder, relative to it, which is put into the page. `"pixelated": true` keeps small
  images crisp when they are enlarged; `"small": true` enlarges them less.
- `lines`: `{"x": [...], "series": {name: [...]}, "xlabel": ..., "ylabel": ...}`; null is a gap.
- `bars`: `{"labels": [...], "series": {name: [...]}, "ylabel": ...}`.
- `table`: `{"columns": [...], "rows": [[...], ...]}`, sortable by a click.

`lines` and `bars` take `"format": "percent"`, `"seconds"` or `"bytes"` for the values (fractions, seconds, bytes), and
`"better": "higher"` or `"lower"`.
A block that can't be shown becomes a sentence that says why; it never breaks the page.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from dynafed.report.clean import is_number
from dynafed.report.text import escape, number

FORMATS = ("number", "percent", "seconds", "bytes")
DATA_URI = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+")
PNG = b"\x89PNG\r\n\x1a\n"


class BlockError(Exception):
    """Why a block can't be shown."""


def chart(kind: str, data: Any) -> dict[str, Any]:
    """The chart of a `lines` or `bars` block."""
    over = "x" if kind == "lines" else "labels"
    along = _list(data, over)
    if kind == "lines" and not all(is_number(x) for x in along):
        raise BlockError("x must be numbers")
    series = _get(data, "series", dict)
    for name, values in series.items():
        if not isinstance(values, list) or len(values) != len(along):
            raise BlockError(f"series '{name}' must have {len(along)} values, one for each of {over}")
        if not all(value is None or is_number(value) for value in values):
            raise BlockError(f"series '{name}' must be numbers")
    spec = {
        "kind": kind,
        "xlabel": str(data.get("xlabel", "")),
        "ylabel": str(data.get("ylabel", "")),
        "format": data["format"] if data.get("format") in FORMATS else "number",
        "better": _better(data),
    }
    named = [(str(name), values) for name, values in series.items()]
    if kind == "bars":
        labels = [number(label) for label in along]
        return spec | {"labels": labels, "series": [{"name": name, "y": values} for name, values in named]}
    order = sorted(range(len(along)), key=lambda index: along[index])
    x = [along[index] for index in order]
    return spec | {
        "series": [
            {"name": name, "x": x, "y": [values[i] for i in order], "color": place}
            for place, (name, values) in enumerate(named)
        ]
    }


def table(data: Any) -> str:
    """The HTML of a `table` block."""
    columns, rows = _list(data, "columns"), _list(data, "rows")
    if not all(isinstance(row, list) and len(row) == len(columns) for row in rows):
        raise BlockError(f"each row must have {len(columns)} cells")
    numeric = [all(row[i] is None or is_number(row[i]) for row in rows) for i in range(len(columns))]
    return sortable_table(
        [(escape(column), numeric[i]) for i, column in enumerate(columns)], [_cells(row) for row in rows]
    )


def sortable_table(
    columns: list[tuple[str, bool]],
    rows: list[list[tuple[str, Any]]],
    *,
    style: str = "",
    sorted_by: int | None = None,
    down: bool = True,
    label: str = "table",
) -> str:
    """A table that sorts by a click on a column; cells are (HTML, the value to sort by), columns (HTML, is numeric).

    The rows are already in order of column `sorted_by`, the largest first if `down`. Roles are explicit: on a phone
    some tables become cards.
    """
    sort = f' aria-sort="{"descending" if down else "ascending"}"'
    kind = [' class="num"' if numeric else "" for _, numeric in columns]
    head = "".join(
        f'<th role="columnheader" scope="col"{kind[i]}{sort if i == sorted_by else ""}>'
        f'<button type="button">{name}</button></th>'
        for i, (name, _) in enumerate(columns)
    )
    names = [re.sub(r"<[^>]*>", "", name) for name, _ in columns]
    body = "".join(
        '<tr role="row">'
        + "".join(
            f'<td role="cell"{kind[i]} data-label="{names[i]}" data-v="{escape("" if v is None else v)}">{text}</td>'
            for i, (text, v) in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table role="table" class="sortable {style}">'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead><tbody role="rowgroup">{body}</tbody></table></div>'
    )


def images(data: Any, folder: Path) -> str:
    """The HTML of an `images` block."""
    shown = []
    for image in _list(data, "images"):
        source, caption = str(_get(image, "src", str)), escape(image.get("caption") or "")
        shown.append(
            f'<figure><img src="{escape(_inlined(source, folder))}" alt="{caption}">'
            + (f"<figcaption>{caption}</figcaption>" if caption else "")
            + "</figure>"
        )
    style = "".join(f" {name}" for name, key in (("crisp", "pixelated"), ("small", "small")) if data.get(key))
    return f'<div class="images{style}">{"".join(shown)}</div>'


def in_gallery(block: Any) -> bool:
    """Whether a block holds nothing but the synthesis' own pictures, which `class_gallery` shows by class."""
    data = block.get("data") if isinstance(block, dict) and block.get("kind") == "images" else None
    images = data.get("images") if isinstance(data, dict) else None
    sources = [i.get("src") for i in images if isinstance(i, dict)] if isinstance(images, list) else []
    return bool(sources) and all(re.fullmatch(r"synthetic(-\d+)?\.png|samples/\d+\.png", str(s)) for s in sources)


def is_lone_accuracy(block: Any) -> bool:
    """Whether a block is a table of one accuracy, which the numbers of the synthesis have already."""
    data = block.get("data") if isinstance(block, dict) and block.get("kind") == "table" else None
    return isinstance(data, dict) and data.get("columns") == ["accuracy"] and len(data.get("rows") or ()) == 1


def _better(data: Any) -> str:
    """Which way is better: as told, else as the name of the values has it."""
    told, label = data.get("better"), str(data.get("ylabel", ""))
    if told in ("higher", "lower"):
        return str(told)
    return "lower" if label.endswith(("loss", "distance")) else "higher" if label.endswith("accuracy") else ""


def paragraphs(text: Any) -> str:
    """Plain text as HTML, with a blank line between paragraphs."""
    return "".join(f"<p>{escape(part.strip())}</p>" for part in re.split(r"\n\s*\n", str(text)) if part.strip())


def _inlined(source: str, folder: Path) -> str:
    if source.startswith("data:"):
        if not DATA_URI.fullmatch(source):
            raise BlockError("a data URI must be a base64 png, jpeg, gif or webp")
        return source
    home, path = folder.resolve(), (folder / source).resolve()
    if not path.is_relative_to(home) or path.suffix.lower() != ".png" or not path.is_file():
        raise BlockError(f"'{source}' is not a PNG inside the run folder")
    content = path.read_bytes()
    if not content.startswith(PNG):
        raise BlockError(f"'{source}' is not a PNG")
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _cells(row: list[Any]) -> list[tuple[str, Any]]:
    return [(escape(number(cell)), cell) for cell in row]


def _get(data: Any, key: str, kind: type) -> Any:
    if not isinstance(data, dict) or not isinstance(data.get(key), kind):
        raise BlockError(f"data must have '{key}'")
    return data[key]


def _list(data: Any, key: str) -> list[Any]:
    found: list[Any] = _get(data, key, list)
    return found

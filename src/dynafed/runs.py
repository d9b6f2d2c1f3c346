"""The runs in some folders as rows: found, filtered, sorted. From their files alone, without torch."""

from __future__ import annotations

import fnmatch
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynafed.config import parse_override
from dynafed.engine.files import is_locked
from dynafed.errors import UserError, printable
from dynafed.progress import METRICS, format_metric
from dynafed.report.load import Run, find_runs, load_run, name_attack
from dynafed.settings import nearest

Row = dict[str, Any]
"""What is known of a run: its folder, state and numbers, and its config by flat key; `rounds` are those planned."""

SETTINGS = ("dataset", "model", "alpha", "clients", "participation", "optimizer", "lr", "seed")
"""Keys of the config that have a column if the runs differ in them."""

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}


def list_runs(paths: Sequence[Path], where: Iterable[str] = (), sort: str = "", reverse: bool = False) -> list[Row]:
    """The runs in `paths` that meet every condition, such as `alpha<0.1` or `method=*dynafed*`.

    Sorted by the key `sort`, else as they are found; those without it come last.
    """
    rows = [_row(load_run(path)) for path in find_runs(paths)]
    known = {key: None for row in rows for key in row}
    for condition in where:
        test = _condition(condition, known)
        rows = [row for row in rows if test(row)]
    if sort:
        key = _checked(sort, known)
        given = [row for row in rows if row.get(key) is not None]
        texts = any(isinstance(row[key], str) for row in given)
        given.sort(key=lambda row: str(row[key]) if texts else row[key], reverse=reverse)
        rows = given + [row for row in rows if row.get(key) is None]
    return rows


def columns(rows: Sequence[Mapping[str, Any]], more: Iterable[str] = ()) -> list[str]:
    """The columns worth showing: what each run is, how far it is, and in what the runs differ."""
    different = [key for key in SETTINGS if len({repr(row.get(key)) for row in rows}) > 1]
    metrics = {row["metric"]: None for row in rows} or METRICS[:1]
    attacked = ["attack"] if any(row.get("attack") for row in rows) else []
    return list(dict.fromkeys(["run", "method", *attacked, *different, *more, "state", "rounds", *metrics]))


def text(row: Mapping[str, Any], column: str) -> str:
    """A cell as people read it."""
    value = row.get(column)
    if value is None:
        return ""
    match column:
        case "rounds":
            return f"{row['done']}/{value}"
        case "accuracy" | "rmse" | "best" | "std":
            return format_metric(row["metric"], value)
        case "seconds":
            return f"{value:.1f}"
        case "changed":
            return time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
        case _:
            return printable(str(value))


def _row(run: Run) -> Row:
    last = max((file.stat().st_mtime for file in run.path.iterdir() if file.is_file()), default=0.0)
    state = "running" if is_locked(run.path) else "done" if run.finished else "stopped"
    row: Row = {
        "run": str(run.path),
        "state": state,
        "done": run.done,
        "metric": run.metric,
        **{metric: run.final if metric == run.metric else None for metric in METRICS},
        "std": run.final_std,
        "best": run.best[1] if run.best else None,
        "seconds": (run.summary or {}).get("seconds") or run.total("seconds"),
        "changed": last,
        "attack": name_attack(run.config.get("attack.kind", "none"), run.config.get("attack.share", 0.2)),
    }
    return row | {key: value for key, value in run.config.items() if key not in row}


def _condition(text: str, known: Iterable[str]) -> Callable[[Row], bool]:
    parts = re.fullmatch(r"([\w.-]+?)\s*(<=|>=|!=|<|>|=)\s*(.*)", text)
    if parts is None:
        raise UserError(f"--where {text}: expected a condition such as alpha<0.1 or method=*dynafed*")
    key, sign, value = parts.groups()
    _checked(key, known)
    wanted = parse_override(f"{key}={value}")[1]

    def holds(row: Row) -> bool:
        found = row.get(key)
        if isinstance(found, str) and sign in ("=", "!="):
            return fnmatch.fnmatchcase(found, value) == (sign == "=")
        try:
            return found is not None and _COMPARE[sign](found, wanted)
        except TypeError:
            raise UserError(f"--where {text}: {key} is {found!r} in {row['run']}, which can't be compared") from None

    return holds


def _checked(key: str, known: Iterable[str]) -> str:
    if key not in (known := list(known)):
        raise UserError(f"unknown key '{key}': {nearest(key, known)}")
    return key

"""The paper's tables and figures, as `paper.json` has them: settings, numbers, and the lines of the source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from dynafed.errors import UserError
from dynafed.settings import nearest


@dataclass(frozen=True)
class Column:
    """One setting of a table, or one panel or curve of a figure."""

    name: str
    settings: Mapping[str, Any]
    """Config keys that set it apart from the paper's protocol."""
    target: float | None = None
    """The accuracy to be reached, where rounds are counted."""


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper."""

    name: str
    title: str
    label: str
    """In the paper's source, at `line`."""
    line: int
    columns: tuple[Column, ...]
    methods: tuple[str, ...]
    numbers: Mapping[tuple[str, str], tuple[float, float]]
    """By column and method: the paper's mean and deviation. Empty for figures: the source has their captions only."""
    claims: tuple[tuple[int, str], ...] = ()
    """What the paper says about a figure, with the line."""
    notes: tuple[str, ...] = ()

    @property
    def counts_rounds(self) -> bool:
        """Whether its numbers are rounds to a target; else they are accuracies, in percent."""
        return any(column.target for column in self.columns)


def experiments() -> dict[str, Experiment]:
    """Every table and figure by name."""
    return {name: _experiment(name, entry) for name, entry in _read().items() if "columns" in entry}


def get_experiment(name: str) -> Experiment:
    """The table or figure with this name."""
    known = experiments()
    if name not in known:
        raise UserError(f"unknown table or figure '{name}': {nearest(name, known)}; `dynafed reproduce list` has all")
    return known[name]


def source() -> str:
    """What the numbers are taken from."""
    return str(_read()["source"])


def _experiment(name: str, entry: Mapping[str, Any]) -> Experiment:
    columns = tuple(Column(column["name"], column["settings"], column.get("target")) for column in entry["columns"])
    rows = entry.get("rows", {})
    return Experiment(
        name,
        entry["title"],
        entry["label"],
        entry["line"],
        columns,
        tuple(entry.get("methods", rows)),
        {
            (column.name, method): (value, deviation)
            for method, row in rows.items()
            for column, (value, deviation) in zip(columns, row["values"], strict=True)
        },
        tuple((claim["line"], claim["text"]) for claim in entry.get("claims", ())),
        tuple(entry.get("notes", ())),
    )


@cache
def _read() -> dict[str, Any]:
    text = (resources.files("dynafed.reproduce") / "paper.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found

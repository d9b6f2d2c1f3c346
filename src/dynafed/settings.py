"""Typed, frozen groups of settings, checked value by value; the machinery under `config.py` and every method's section.

A group is a frozen dataclass whose fields are made by `setting`. `build` turns a plain dict (from TOML or the command
line) into a group and refuses unknown keys, wrong types and impossible values with a sentence that names the way out.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from dynafed.errors import UserError

Group = TypeVar("Group")

ALIKE = 0.77
"""The share of two words' letters that must agree, in order, for one to be suggested in place of the other."""

ALMOST_EQUAL = 0.9
"""The same for names that come before those with the same words."""


LARGEST_INT = 2**62
"""Whole numbers beyond fit into no tensor."""


def setting(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    execution: bool = False,
) -> Any:
    """A described field: at least `low`, at most `high`, strictly more than `above`, or one of `choices`.

    `execution` marks a key that decides how a run is executed, not what it computes.
    """
    return dataclasses.field(
        default=default,
        metadata={"doc": doc, "low": low, "high": high, "above": above, "choices": choices, "execution": execution},
    )


def alike(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled alike, or has the same words in it (local_epochs for epochs), if there is one."""
    by_lower = {one.lower(): one for one in sorted(known)}
    words = {one: set(re.split(r"[_.+-]", one)) for one in (name.lower(), *by_lower)}
    given = words[name.lower()]
    related = [one for one in by_lower if given <= words[one] or words[one] <= given]
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=ALMOST_EQUAL)
    close = close or difflib.get_close_matches(name.lower(), related or by_lower, n=1, cutoff=0 if related else ALIKE)
    return by_lower[close[0]] if close else None


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of an error sentence: the known name that is alike, with its prefix, else all of them."""
    known = sorted(known)
    found = alike(name, known)
    return f"did you mean '{prefix}{found}'?" if found else f"known: {', '.join(known)}"


def build(group: type[Group], values: Mapping[str, Any], prefix: str = "") -> Group:
    """Make a checked `group` from plain values; keys that are left out keep their defaults."""
    fields = {field.name: field for field in dataclasses.fields(group)}  # type: ignore[arg-type]
    types = typing.get_type_hints(group)
    checked = {}
    for name, value in values.items():
        if name not in fields:
            # The prefix would make any two keys of a section alike.
            raise UserError(f"unknown key '{prefix}{name}': {nearest(name, fields, prefix)}")
        checked[name] = _checked(prefix + name, value, types[name], fields[name].metadata)
    return group(**checked)


def plain(group: Any) -> dict[str, Any]:
    """The inverse of `build`: a dict that TOML and JSON can hold."""
    return {
        field.name: list(value) if isinstance(value := getattr(group, field.name), tuple) else value
        for field in dataclasses.fields(group)
    }


def describe(group: type[Any]) -> list[dict[str, Any]]:
    """Name, type, default, allowed values and help of every field, for the command line and the docs."""
    types = typing.get_type_hints(group)
    return [
        {
            "name": field.name,
            "type": _type_name(types[field.name]),
            "default": list(field.default) if isinstance(field.default, tuple) else field.default,
            "range": _range(field.metadata),
            "choices": list(field.metadata["choices"] or ()),
            "execution": field.metadata["execution"],
            "help": field.metadata["doc"],
        }
        for field in dataclasses.fields(group)
        if "doc" in field.metadata
    ]


def _type_name(kind: Any) -> str:
    return f"list of {typing.get_args(kind)[0].__name__}" if typing.get_origin(kind) is tuple else str(kind.__name__)


def _range(rule: Mapping[str, Any]) -> str:
    """The bounds of a number as one writes them, such as "> 0, <= 1"; empty without any."""
    signs = {"low": ">=", "above": ">", "high": "<="}
    return ", ".join(f"{sign} {rule[bound]:g}" for bound, sign in signs.items() if rule[bound] is not None)


def _checked(name: str, value: Any, kind: Any, rule: Mapping[str, Any]) -> Any:
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise UserError(f"{name} = {value!r} must be a list")
        return tuple(_checked(name, item, typing.get_args(kind)[0], rule) for item in value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        value = value.item()  # without importing numpy for it
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise UserError(f"{name} is too large a number") from None
    if kind is str and type(value) is float and math.isnan(value):
        value = "nan"  # TOML takes the bare word for a number
    if type(value) is not kind:
        raise UserError(f"{name} = {value!r} must be {_ARTICLES[kind]}, not {type(value).__name__}")
    if kind is int and abs(value) > LARGEST_INT:
        raise UserError(f"{name} is too large a number")
    if kind is float and not math.isfinite(value):
        raise UserError(f"{name} = {value!r} must be finite")
    if (choices := rule["choices"]) is not None and value not in choices:
        meant = f": did you mean '{found}'?" if (found := alike(str(value), choices)) else ""
        raise UserError(f"{name} = {value!r} is not one of {', '.join(choices)}{meant}")
    low, high, above = rule["low"], rule["high"], rule["above"]
    if low is not None and value < low:
        raise UserError(f"{name} = {value!r} must be at least {low:g}")
    if high is not None and value > high:
        raise UserError(f"{name} = {value!r} must be at most {high:g}")
    if above is not None and value <= above:
        raise UserError(f"{name} = {value!r} must be more than {above:g}")
    return value


_ARTICLES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}

"""What a run's files say, as the pages can use it: run folders come from anybody, and anything may be in them.

What isn't of its kind is left out here, once, so that nobody who reads a `Run` has to look again: numbers are finite
and not absurdly large, lists are lists, and texts can be written to a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dynafed.config import Config

LARGEST = 1e100
"""Numbers beyond count as not finite: the squares and sums of these are numbers still."""

LEVELS = 10
"""Nothing that a run writes is nested deeper."""

MOST_ROUNDS = 10**9

LISTS = frozenset(("clients", "dropped", "rejected", "attackers", "client_names"))
"""Of a round's record; all else but a few tables is a number."""

_DEFAULTS = {field.name: field.default for field in fields(Config)}


def is_number(value: Any) -> bool:
    """Whether it can be computed with; what `plain` returned is finite, too."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain(value: Any, levels: int = LEVELS) -> Any:
    """Parsed JSON or TOML with texts that UTF-8 can hold; None for what isn't finite or lies too deep."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if is_number(value):
        return value if abs(value) <= LARGEST else None
    if not isinstance(value, Mapping | list):
        return value
    if not levels:
        return None
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(each, levels - 1) for key, each in value.items()}
    return [plain(each, levels - 1) for each in value]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def clean_config(values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """A config by flat key, without values of another kind than the config's keys have."""
    flat = flatten(plain(values))
    odd = [key for key, value in flat.items() if not _fits(value, _DEFAULTS.get(key))]
    if odd:
        notes.append(f"config.toml has an odd value of {', '.join(odd[:5])}, left out")
    return {key: value for key, value in flat.items() if key not in odd}


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or not isinstance(default, int | float | str | tuple):
        return value is not None
    if isinstance(default, int | float):
        return is_number(value) and (isinstance(value, int) or isinstance(default, float))
    return isinstance(value, str if isinstance(default, str) else list)


def clean_summary(raw: Any) -> dict[str, Any] | None:
    """The numbers of summary.json, with what the run was made, and whether it was stopped."""
    if not isinstance(raw, Mapping):
        return None
    texts = {key: raw[key] for key, kind in (("versions", dict), ("stopped", str)) if isinstance(raw.get(key), kind)}
    return {key: value for key, value in raw.items() if is_number(value)} | texts


def clean_record(raw: Any) -> dict[str, Any]:
    """A round's record by flat key, from what `plain` returned; raises ValueError if it is none."""
    if not isinstance(raw, Mapping) or type(raw.get("round")) is not int or not 0 <= raw["round"] <= MOST_ROUNDS:
        raise ValueError("not the record of a round")
    by_client = {key: value for key, value in raw.items() if "_per_client" in key}
    flat = flatten({key: value for key, value in raw.items() if key not in by_client})
    return {key: value for key, value in flat.items() if _belongs(key, value)} | {
        key: {name: each for name, each in value.items() if _is_measured(each)}
        for key, value in by_client.items()
        if isinstance(value, Mapping)
    }


def _belongs(key: str, value: Any) -> bool:
    """Whether a key of a record has a value of its kind."""
    if key in LISTS:
        return isinstance(value, list)
    match key.split("."):
        case ["skipped"]:
            return isinstance(value, bool)
        case ["synthesis_refused"]:
            return isinstance(value, str)
        case ["accuracy_per_class"]:
            return _all_measured(value)
        case ["confusion"]:
            return isinstance(value, list) and all(_all_measured(row) and len(row) == len(value) for row in value)
        case ["watch", client, when]:
            return client.isdecimal() and (_all_measured(value) if when == "local" else _is_measured(value))
        case ["watch", *_]:
            return False
    return _is_measured(value) and not (key.startswith(("seconds", "bytes", "repeats")) and (value or 0) < 0)


def _is_measured(value: Any) -> bool:
    return value is None or is_number(value)


def _all_measured(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_measured, values))

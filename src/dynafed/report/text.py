"""Values as text: escaped, rounded, with units."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable
from typing import Any

NONE = "–"
THIN = "\u202f"
"""A narrow space that doesn't break, between a number and its unit."""


def escape(value: object) -> str:
    """Any value as HTML text, also safe inside an attribute."""
    return html.escape(str(value), quote=True)


def percent(share: float | None, digits: int = 2) -> str:
    """0.7142 as 71.42 %."""
    return NONE if share is None else f"{100 * share:.{digits}f}{THIN}%"


def mean_std_percent(mean: float | None, std: float | None) -> str:
    """Mean and standard deviation of a share, in percent: 71.42 ± 0.31 %."""
    if mean is None or std is None:
        return percent(mean)
    return f"{100 * mean:.2f}{THIN}±{THIN}{100 * std:.2f}{THIN}%"


def duration(seconds: float | None) -> str:
    """Seconds in one or two units: 0.42 s, 42 s, 12 min 3 s, 3 h 12 min, 2 d 3 h."""
    if seconds is None:
        return NONE
    if seconds < 0.0995:
        return f"{1000 * seconds:.3g}{THIN}ms"
    if seconds < 59.5:
        return f"{seconds:.2g}{THIN}s" if seconds < 9.95 else f"{seconds:.0f}{THIN}s"
    whole = round(seconds)
    if whole < 3600:
        return _two(whole, 60, "min", 1, "s")
    return _two(whole, 3600, "h", 60, "min") if whole < 86400 else _two(whole, 86400, "d", 3600, "h")


def size(count: float | None) -> str:
    """Bytes with a decimal unit: 1.23 MB."""
    if count is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g}{THIN}{unit}" if count < 999.5 else f"{count:.0f}{THIN}{unit}"


def number(value: object) -> str:
    """A plain value as the page shows it: whole numbers grouped, floats short, the rest as it is."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}".replace(",", THIN) if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)


def plural(count: int, noun: str, many: str | None = None) -> str:
    """1 round, 2 rounds."""
    return f"{number(count)} {noun if count == 1 else many or noun + 's'}"


def join_limited(items: Iterable[object], limit: int = 12) -> str:
    """`a, b, c`, cut after `limit` items."""
    words = [str(item) for item in items]
    rest = len(words) - limit
    return ", ".join(words[:limit]) + (f" and {rest} more" if rest > 0 else "")


def setting(value: Any) -> str:
    """A config value as TOML spells it, without the quotes of strings."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str) if isinstance(value, bool | list) else str(value)


def to_json_data(value: Any) -> Any:
    """Plain data for JSON: floats rounded to six digits, what isn't finite as None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): to_json_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_data(item) for item in value]
    return value


def script_json(value: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can close the element or open a comment."""
    text = json.dumps(to_json_data(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _two(seconds: int, large: int, unit: str, small: int, below: str) -> str:
    rest = seconds % large // small
    return f"{seconds // large}{THIN}{unit}" + (f" {rest}{THIN}{below}" if rest else "")

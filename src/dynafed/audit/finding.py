"""What one test of an audit found, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One section of the page."""

    title: str
    tested: str
    found: str
    not_proved: str
    leaks: bool | None
    """Whether the test found something; None if it could not be made."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """For audit.json: plain values."""
    blocks: list[dict[str, Any]] = field(default_factory=list)
    """Tables, charts and pictures, as in report.json."""

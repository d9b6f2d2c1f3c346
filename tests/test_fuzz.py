"""Every reader of what others wrote, on damaged and made-up files: read, or refused in one line."""

from __future__ import annotations

import pytest
from fuzzing import TARGETS, check


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_is_read_is_refused_in_one_line_at_worst(name: str) -> None:
    check(name, 60)

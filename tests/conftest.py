"""What the tests share."""

from __future__ import annotations

import pytest
from problems import run_tiny

import dynafed


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dynafed.Result:
    """One finished tiny run, to look at."""
    return run_tiny(tmp_path_factory.mktemp("finished") / "run")

"""What the tests share."""

from __future__ import annotations

import os

# One thread a process: several test processes with several threads each only get into each other's way.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from problems import run_tiny

import dynafed


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dynafed.Result:
    """One finished tiny run, to look at."""
    return run_tiny(tmp_path_factory.mktemp("finished") / "run")

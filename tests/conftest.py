"""What the tests share."""

from __future__ import annotations

import os
import signal

# One thread a process: several test processes with several threads each only get into each other's way.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from problems import run_tiny

import dynafed

# A job in a shell's background ignores Ctrl-C, and one under nohup SIGHUP; so would the runs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dynafed.Result:
    """One finished tiny run, to look at."""
    return run_tiny(tmp_path_factory.mktemp("finished") / "run")

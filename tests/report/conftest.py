from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_runs import MakeRun, fake_run


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Make a fake run folder: `make_run("name", rounds=20, method="fedavg", seed=0, ...)`."""

    def make(name: str = "run", **keys: Any) -> Path:
        return fake_run(tmp_path / name, **keys)

    return make

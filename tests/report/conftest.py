from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from fake_runs import MakeRun, fake_run


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Make a fake run folder: `make_run("name", rounds=20, method="fedavg", seed=0, ...)`."""

    def make(name: str = "run", **keys: Any) -> Path:
        return fake_run(tmp_path / name, **keys)

    return make


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one

"""The examples with data of one's own run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples/own-data"


@pytest.mark.parametrize("name", ["tabular", "text", "images"])
def test_an_example_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.main(tmp_path, rounds=14)
    assert len(found) == 2
    assert all(0.3 < accuracy <= 1 for accuracy in found.values())
    printed = capsys.readouterr().out
    assert ("needs the gradient" in printed) == (name == "text")

"""docs/methods.md: every method and setting is in it, and its worked example works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import dynafed
from dynafed.methods import METHODS
from dynafed.settings import describe

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "methods.md").read_text()


def test_every_method_and_every_setting_is_described() -> None:
    sections = {part.split("`")[0]: part for part in TEXT.split("\n### `")[1:]}
    for name, kind in ((name, METHODS.load(name)) for name in METHODS.names()):
        if not kind.__module__.startswith("dynafed.methods.") or name == "dynafed":
            continue
        assert kind.citation.split(",")[0].split(" ")[0] in sections[name]
        for field in describe(kind.Settings) if kind.Settings else []:
            assert f"`{field['name']}`" in sections[name]
            default = field["default"]
            assert (str(default).lower() if isinstance(default, bool) else str(default)) in sections[name]


def test_the_worked_example_is_found_listed_and_keeps_the_contract(tmp_path: Path) -> None:
    method, test = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    real, copy = Path(dynafed.__file__).parent, tmp_path / "dynafed"
    (copy / "methods").mkdir(parents=True)
    for folder in (real, real / "methods"):
        for entry in folder.iterdir():
            if entry.name not in ("methods", "__pycache__"):
                (copy / entry.relative_to(real)).symlink_to(entry)
    (copy / "methods" / "fedexp.py").write_text(method)
    (tmp_path / "test_fedexp.py").write_text(test)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    tests = (str(tmp_path / "test_fedexp.py"), "tests/contract")
    printed = python("-m", "pytest", *tests, "-k", "fedexp and not iid", "-p", "no:cacheprovider", "-n", "0", "-v")
    assert "9 passed" in printed  # its own two, and seven of the contract
    assert "Jhunjhunwala" in python("-m", "dynafed", "methods", "--json")

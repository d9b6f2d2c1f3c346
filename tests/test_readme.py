"""What the README and the docs promise: their Python runs, their commands and links exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import dynafed
from dynafed.cli import make_parser
from dynafed.methods import METHODS
from dynafed.settings import describe
from dynafed.synthesis import DynaFedSettings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_examples_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"README.md, example {number + 1}", "exec"), {})


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 3


def test_the_methods_are_counted() -> None:
    kinds = [METHODS.load(name) for name in METHODS.names()]
    assert f"{sum(kind.__module__.startswith('dynafed.methods.') for kind in kinds)} methods" in README


def test_commands_parse() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
    commands = re.findall(r"^\$ dynafed (.*?)(?:\s+#.*)?$", pages, flags=re.MULTILINE)
    assert commands
    for command in commands:
        make_parser().parse_args(command.split())


@pytest.mark.parametrize("page", sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!http|#)(.*?)(?:#.*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_callbacks_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "callbacks.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(block, "docs/callbacks.md", "exec"), names)
    assert list(Path("runs/logged/tensorboard").glob("events*"))
    functions = [name for name in vars(dynafed.Callback) if name.startswith("on_")]
    for name in (*functions, *dynafed.RunContext.__dataclass_fields__):
        assert f"| `{name}" in page, name
    for toml in re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL):
        dynafed.Config.from_dict(tomllib.loads(toml))


def test_plugins_page(tmp_path: Path) -> None:
    """Its package, installed by hand, runs by short names and by places, and is listed."""
    page = (ROOT / "docs" / "plugins.md").read_text()
    blocks = dict(re.findall(r"<!-- (.*?) -->\n```\w+\n(.*?)```", page, flags=re.DOTALL))
    points = tomllib.loads(blocks["pyproject.toml"])["project"]["entry-points"]
    info = tmp_path / "fed_extras-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: fed-extras\nVersion: 0.1.0\n")
    lines = [
        line for group, parts in points.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in parts.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "fed_extras.py").write_text(blocks["fed_extras.py"])
    config = blocks["rings.toml"]
    (tmp_path / "short.toml").write_text(config)
    for parts in points.values():
        for name, place in parts.items():
            config = re.sub(rf'(= \[?".*?){name}"', rf'\1{place}"', config)
    (tmp_path / "places.toml").write_text(config)
    script = """
import dynafed
from dynafed.data import DATASETS
from dynafed.methods import METHODS
short, places = (dynafed.run(dynafed.Config.load(f"{kind}.toml"), out=kind) for kind in ("short", "places"))
assert short.history[-1]["accuracy"] == places.history[-1]["accuracy"]
assert short.history[-1]["share"] == 0.8 and short.model[1].out_features == 8
assert 2 * short.history[0]["bytes_up"] == short.history[0]["bytes_down"]
assert (short.path / "log.csv").read_text().count("\\n") == 21
assert short.final_accuracy > 0.8
assert "part-way" in METHODS.names() and "rings" in DATASETS.names()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_make_has_the_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in ("demo", "test", "setup"):
        assert f"`make {word}`" in README or f"make {word}" in README or word == "setup"
        assert re.search(rf"^{word}:", makefile, flags=re.MULTILINE)


def test_every_dynafed_setting_is_documented() -> None:
    page = (ROOT / "docs" / "synthesis.md").read_text()
    for setting in describe(DynaFedSettings):
        assert f"| `{setting['name']}` |" in page
        assert setting["help"] in page, setting["name"]

"""The README's promises: its Python runs, its commands and links exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynafed.cli import _parser
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


def test_commands_parse() -> None:
    commands = re.findall(r"^\$ dynafed (.*?)(?:\s+#.*)?$", README, flags=re.MULTILINE)
    assert commands
    for command in commands:
        _parser().parse_args(command.split())


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!http)(.*?)\)", README):
        assert (ROOT / link).exists(), link


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

"""The files about the project agree with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_oldest_dependencies_are_the_lower_bounds() -> None:
    extras = PROJECT["optional-dependencies"]
    users = [name for name in extras if name not in ("docs", "dev")]
    required = [*PROJECT["dependencies"], *(requirement for name in users for requirement in extras[name])]
    pins = (ROOT / "constraints-oldest.txt").read_text("utf-8").splitlines()[1:]
    assert pins == [re.sub(r"(\[.*\])?>=([\d.]+).*", r"==\2", requirement) for requirement in required]


def test_the_citation_names_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^version: (.*)$", citation, flags=re.MULTILINE) == [PROJECT["version"]]


def test_the_changelog_starts_with_what_is_unreleased() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## (.*)$", changelog, flags=re.MULTILINE)[0] == "[Unreleased]"

"""The docs: every Python snippet runs, and the site builds without a warning and without the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))

ELSEWHERE = {
    "callbacks.md": "test_readme.py",
    "data.md": "data/test_data_docs.py",
    "methods.md": "methods/test_docs.py",
    "plugins.md": "test_readme.py",
}
"""Pages whose snippets another test runs, because they need files or a package around them."""


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page", [page for page in DOCS if snippets(page) and page.name not in ELSEWHERE], ids=lambda page: page.name
)
def test_the_snippets_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "snippets"}
    for number, code in enumerate(snippets(page), 1):
        exec(compile(code, f"{page.name}, snippet {number}", "exec"), names)


def test_the_other_tests_name_their_pages() -> None:
    for page, test in ELSEWHERE.items():
        assert f'"{page}"' in (ROOT / "tests" / test).read_text("utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = {page.stem for page in DOCS} - {"index"} | {"results", "contributing", "changelog"}
    assert {path.parent.name for path in site.glob("*/index.html")} == pages
    start = (site / "index.html").read_text("utf-8")
    for page in pages:
        assert f'href="{page}/"' in start, page


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        assert not re.findall(r'<(?:script|link|img|iframe|source)[^>]+(?:src|href)="(?:https?:)?//[^"]+"', text), page
        assert 'data-md-component="source"' not in text  # it would ask GitHub how many stars there are
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text("utf-8")), sheet


def test_lists_and_tables_are_not_left_as_text(site: Path) -> None:
    for page in site.glob("*/index.html"):
        prose = re.sub(r"<pre.*?</pre>", "", page.read_text("utf-8"), flags=re.DOTALL)
        assert not re.findall(r"^(?:<p>)?(?:- |\| |\|--).*$", prose, flags=re.MULTILINE), page


def test_the_api_page_has_the_public_names(site: Path) -> None:
    import dynafed

    page = (site / "api" / "index.html").read_text("utf-8")
    for name in set(dynafed.__all__) - {"__version__"}:
        assert re.search(rf'id="dynafed\.(?:[\w.]+\.)?{name}"', page), name


def test_ci_and_make_build_it() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"]
    assert {"run": "make docs"} in jobs["docs"]["steps"]

"""What the site needs beyond the Markdown files, which stay as a code host shows them.

Pages from the repository's own files (README.md, CONTRIBUTING.md, CHANGELOG.md), public names that docs/api.md doesn't
name yet, links that lead out of docs/, and lists that follow a paragraph without a blank line.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "results.md": "README.md"}
"""Pages of the site that are files, or parts of them, outside docs/."""
SECTIONS = ("Results", "Speed", "What is promised")
"""The sections of README.md that make the page of results."""

log = logging.getLogger("mkdocs.hooks.dynafed")


def on_config(config: Any) -> Any:
    """Put pages that the navigation doesn't name under "More"; leave out those that aren't there (yet)."""
    there = {path.name for path in (ROOT / "docs").glob("*.md")} | PAGES.keys()
    config.nav = [kept for entry in config.nav if (kept := _existing(entry, there)) is not None]
    rest = sorted(there - set(re.findall(r"[\w-]+\.md", str(config.nav))))
    if rest:
        config.nav.append({"More": rest})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for name, source in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        if name == "results.md":
            parts = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
            text = "# Results\n\n## " + "\n## ".join(parts[section] for section in SECTIONS)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links and lists work on the site; code stays as it is."""
    source = Path(PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    if page.file.src_uri == "api.md":
        markdown += _unnamed(markdown)
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [_prose(part, source) for part in parts[::2]]
    return "".join(parts)


def _unnamed(api: str) -> str:
    """The public names of the package that the page leaves out."""
    import dynafed

    rest = [name for name in dynafed.__all__ if name != "__version__" and f"::: dynafed.{name}\n" not in api]
    return "\n## More\n\n" + "\n\n".join(f"::: dynafed.{name}" for name in rest) + "\n" if rest else ""


def _prose(text: str, source: Path) -> str:
    text = re.sub(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)", lambda link: _link(link, source), text)
    # A list, or a table, right after a paragraph.
    text = re.sub(r"^((?![-|#>]|\d+\.|\s).+\n)(?=- |1\. |\|)", r"\1\n", text, flags=re.MULTILINE)
    # A list item's own lines are indented by two here, and must be by four.
    return re.sub(r"^ {2}(?=\S)", "    ", text, flags=re.MULTILINE)


def _link(link: re.Match[str], source: Path) -> str:
    target, anchor = link[2], link[3] or ""
    if "://" in target or target.startswith("mailto:"):
        return link[0]
    path = os.path.normpath(source.parent / target)
    if not (ROOT / path).exists():
        log.warning("%s links to %s, which doesn't exist", source, target)
    own = {file: name for name, file in PAGES.items() if name != "results.md"}
    if path in own:
        return f"]({own[path]}{anchor})"
    if path == "README.md":
        return f"](index.md{anchor})"
    if Path(path).parent == Path("docs"):
        return f"]({Path(path).name}{anchor})"
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"](https://github.com/dynafed/dynafed/{kind}/main/{path}{anchor})"


def _existing(entry: Any, there: set[str]) -> Any:
    """A navigation entry without pages that don't exist; None if nothing is left."""
    if isinstance(entry, str):
        return entry if entry in there else None
    ((title, inside),) = entry.items()
    if isinstance(inside, str):
        return entry if inside in there or "://" in inside else None
    kept = [one for item in inside if (one := _existing(item, there)) is not None]
    return {title: kept} if kept else None

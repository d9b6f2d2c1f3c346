"""The page as a whole: sections, charts and blocks, put into one HTML file with its style and script."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from dynafed.report import blocks, charts
from dynafed.report.charts import Spec
from dynafed.report.load import Run
from dynafed.report.text import escape, script_json

MOST_IMAGE_CHARACTERS = 1_800_000
"""Images beyond this are left out of a page, so that the whole stays below 3 MB."""


CONTENTS = "<!-- contents -->"
"""Where the links to the sections go, which are known only at the end."""


class Page:
    """Collects sections and the charts in them, and writes the one file."""

    def __init__(self, title: str, base: Path) -> None:
        self.title = title
        self.base = base
        self.parts: list[str] = []
        self.charts: dict[str, Spec] = {}
        self.anchors: dict[str, str] = {}
        self.names: dict[str, int] = {}
        self.image_characters = 0
        self.numbers: dict[str, Any] | None = None

    def add(self, *parts: str) -> None:
        """Put HTML on the page."""
        self.parts += parts

    def section(self, title: str, *parts: str, lead: str = "") -> None:
        """A headed section; left out if there is nothing in it."""
        inside = "".join(parts)
        if inside or lead:
            lead = f'<p class="lead">{lead}</p>' if lead else ""
            self.add(f"{self.heading(title)}{lead}{inside}</section>")

    def heading(self, title: str, level: str = "h2") -> str:
        """The start of a section, with an anchor that stays the same from page to page."""
        name = self.anchor(title)
        if level == "h2":
            self.anchors[name] = title
        link = f'<a class="anchor" href="#{name}" aria-label="link to {escape(title)}">#</a>'
        return f'<section aria-labelledby="{name}"><{level} id="{name}">{escape(title)}{link}</{level}>'

    def anchor(self, title: str) -> str:
        """A name for `title` that nothing else on the page has."""
        plain = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "part"
        self.names[plain] = self.names.get(plain, 0) + 1
        return plain if self.names[plain] == 1 else f"{plain}-{self.names[plain]}"

    def contents(self) -> str:
        """Links to the sections."""
        links = " ".join(f'<a href="#{name}">{escape(title)}</a>' for name, title in self.anchors.items())
        return f'<nav class="contents" aria-label="sections">{links}</nav>' if len(self.anchors) > 1 else ""

    def images(self, inside: str) -> str:
        """HTML with images in it, or a sentence if the page would become too large."""
        if self.image_characters + len(inside) > MOST_IMAGE_CHARACTERS:
            return '<p class="fine">Left out to keep this page small: the images are on the run’s own page.</p>'
        self.image_characters += len(inside)
        return inside

    def chart(
        self,
        spec: Spec | None,
        title: str,
        note: str = "",
        *,
        better: str = "",
        wide: bool = False,
        small: bool = False,
    ) -> str:
        """The place where a chart is drawn, with its caption; `better` is "higher", "lower" or nothing."""
        if spec is None:
            return ""
        name = f"c{len(self.charts)}"
        spec = spec | {"small": small, "title": title, "better": better}
        self.charts[name] = spec
        arrow = {"higher": "↑ higher is better", "lower": "↓ lower is better"}.get(better, "")
        note = "".join(f" <span>{escape(part)}</span>" for part in (arrow, note) if part)
        style = "panel" + (" wide" if wide else "")
        return (
            f'<figure class="{style}" id="{self.anchor(f"chart {title}")}">'
            f"<figcaption><b>{escape(title)}</b>{note}</figcaption>"
            f'<div class="plot" data-chart="{name}" tabindex="0" role="img"'
            f' aria-label="{escape(charts.describe(title, spec))}"></div></figure>'
        )

    def blocks(self, run: Run, level: str, *, gallery: bool) -> str:
        """What the run's `report.json` asks for, without what the page's gallery and tables show already."""
        return "".join(
            self.block(block, run.path, level)
            for block in run.blocks
            if not (gallery and blocks.in_gallery(block)) and not (run.syntheses and blocks.is_lone_accuracy(block))
        )

    def block(self, block: Any, folder: Path, level: str) -> str:
        """One block of `report.json`."""
        if not isinstance(block, dict):
            block = {"title": "report.json", "kind": "?"}
        title, kind = str(block.get("title", "")), block.get("kind", "text")
        try:
            inside = self._inside(kind, block.get("data"), folder, title)
        except blocks.BlockError as why:
            inside = f'<p class="note">This block of report.json can’t be shown: {escape(why)}.</p>'
        head = self.heading(title, level) if title else "<section>"
        return f"{head}{blocks.paragraphs(block.get('text') or '')}{inside}</section>"

    def body(self) -> str:
        """What is on the page."""
        return "\n".join(self.parts).replace(CONTENTS, self.contents(), 1)

    def html(self, live: str = "") -> str:
        """The whole file. `live` is a script that keeps it up to date from the server that it came from."""
        script = _asset("page.js") + live
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        return Template(_asset("page.html")).substitute(
            title=escape(self.title),
            policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
            + ("; connect-src 'self'" if live else ""),
            css=_asset("page.css"),
            body=self.body(),
            data=script_json({"charts": self.charts, "numbers": self.numbers}),
            js=script,
        )

    def _inside(self, kind: Any, data: Any, folder: Path, title: str) -> str:
        if kind in ("lines", "bars"):
            spec = blocks.chart(kind, data)
            return self.chart(spec, str(spec["ylabel"] or title), better=str(spec["better"]), wide=True)
        if kind == "table":
            return blocks.table(data)
        if kind == "images":
            return self.images(blocks.images(data, folder))
        if kind == "text":
            return ""
        raise blocks.BlockError(f"unknown kind '{kind}'; known: images, lines, table, bars")


def _asset(name: str) -> str:
    return (resources.files("dynafed.report") / name).read_text("utf-8")

"""The page as a whole: sections, charts and blocks, put into one HTML file with its style and script."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from dynafed.report import blocks, charts
from dynafed.report.charts import Spec
from dynafed.report.load import Run
from dynafed.report.text import escape, script_json


class Page:
    """Collects sections and the charts in them, and writes the one file."""

    def __init__(self, title: str, base: Path) -> None:
        self.title = title
        self.base = base
        self.parts: list[str] = []
        self.charts: dict[str, Spec] = {}
        self.numbers: dict[str, Any] | None = None

    def add(self, *parts: str) -> None:
        """Put HTML on the page."""
        self.parts += parts

    def section(self, title: str, *parts: str, lead: str = "") -> None:
        """A headed section; left out if there is nothing in it."""
        inside = "".join(parts)
        if inside or lead:
            lead = f'<p class="lead">{lead}</p>' if lead else ""
            self.add(f"<section><h2>{escape(title)}</h2>{lead}{inside}</section>")

    def chart(self, spec: Spec | None, title: str, note: str = "", *, wide: bool = False, small: bool = False) -> str:
        """The place where a chart is drawn, with its caption."""
        if spec is None:
            return ""
        name = f"c{len(self.charts)}"
        self.charts[name] = spec | {"small": small}
        note = f" <span>{escape(note)}</span>" if note else ""
        style = "panel" + (" wide" if wide else "")
        return (
            f'<figure class="{style}"><figcaption><b>{escape(title)}</b>{note}</figcaption>'
            f'<div class="plot" data-chart="{name}" tabindex="0" role="img"'
            f' aria-label="{escape(charts.describe(title, spec))}"></div></figure>'
        )

    def blocks(self, run: Run, level: str = "h2") -> None:
        """What the run's `report.json` asks for."""
        for block in run.blocks:
            self.add(self.block(block, run.path, level))

    def block(self, block: Any, folder: Path, level: str) -> str:
        """One block of `report.json`."""
        if not isinstance(block, dict):
            block = {"title": "report.json", "kind": "?"}
        title, kind = str(block.get("title", "")), block.get("kind", "text")
        try:
            inside = self._inside(kind, block.get("data"), folder, title)
        except blocks.BlockError as why:
            inside = f'<p class="note">This block of report.json can’t be shown: {escape(why)}.</p>'
        head = f"<{level}>{escape(title)}</{level}>" if title else ""
        return f"<section>{head}{blocks.paragraphs(block.get('text') or '')}{inside}</section>"

    def html(self) -> str:
        """The whole file."""
        script = _asset("page.js")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        return Template(_asset("page.html")).substitute(
            title=escape(self.title),
            policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
            css=_asset("page.css"),
            body="\n".join(self.parts),
            data=script_json({"charts": self.charts, "numbers": self.numbers}),
            js=script,
        )

    def _inside(self, kind: Any, data: Any, folder: Path, title: str) -> str:
        if kind in ("lines", "bars"):
            spec = blocks.chart(kind, data)
            return self.chart(spec, str(spec["ylabel"] or title), wide=True)
        if kind == "table":
            return blocks.table(data)
        if kind == "images":
            return blocks.images(data, folder)
        if kind == "text":
            return ""
        raise blocks.BlockError(f"unknown kind '{kind}'; known: images, lines, table, bars")


def _asset(name: str) -> str:
    return (resources.files("dynafed.report") / name).read_text("utf-8")

"""The audit as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynafed.audit.finding import Finding
from dynafed.report.blocks import sortable_table
from dynafed.report.page import CONTENTS, Page
from dynafed.report.text import escape

VERDICTS = {True: "found something", False: "found nothing", None: "not tested"}


def audit_page(title: str, lead: str, findings: Sequence[Finding], folder: Path) -> str:
    """Plain words first; then each test with its numbers and pictures."""
    page = Page(f"Audit of {title}", folder)
    page.add(
        f'<header><p class="eyebrow">dynafed audit · {escape(folder.resolve().name)}</p>'
        f"<h1>What {escape(title)} gives away</h1>"
        f'<p class="verdict">{escape(lead)}</p></header>',
        CONTENTS,
    )
    rows = [[_cell(finding.title), _cell(VERDICTS[finding.leaks]), _cell(finding.found)] for finding in findings]
    page.section(
        "In short",
        sortable_table([("test", False), ("verdict", False), ("what was found", False)], rows, label="summary"),
    )
    for finding in findings:
        text = "".join(
            f"<p><b>{name}</b> {escape(words)}</p>"
            for name, words in (
                ("Tested.", finding.tested),
                ("Found.", finding.found),
                ("Not proved.", finding.not_proved),
            )
        )
        page.section(finding.title, text, *(page.block(block, folder, "h3") for block in finding.blocks))
    return page.html()


def _cell(text: str) -> tuple[str, Any]:
    return escape(text), text

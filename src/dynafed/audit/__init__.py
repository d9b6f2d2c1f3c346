"""`dynafed audit`: what a run's models, its synthetic samples and its trajectory give away, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynafed.audit.canaries import check_canaries
from dynafed.audit.finding import Finding
from dynafed.audit.inversion import check_inversion
from dynafed.audit.membership import check_membership
from dynafed.audit.neighbors import check_neighbors
from dynafed.audit.ownership import check_ownership
from dynafed.audit.page import audit_page
from dynafed.audit.subject import load_subject
from dynafed.engine.files import write_bytes, write_json
from dynafed.privacy import dp_settings
from dynafed.version import __version__

__all__ = ["Audit", "Finding", "audit"]


@dataclass(frozen=True)
class Audit:
    """What an audit left: the page, and each test's finding."""

    page: Path
    findings: Sequence[Finding]
    numbers: dict[str, Any]
    """As in audit.json."""


def audit(path: str | Path, *, shadows: int = 4, canaries: int = 10, trust: bool = False) -> Audit:
    """Test what a run gives away, and leave `audit.html` and `audit.json` in its folder.

    `shadows` runs are made for the membership test, and one more with canaries; each takes as long as the run itself
    (0: none). The data must come from the run's config. Nothing of the run changes. A folder whose config names parts
    such as `package.module:Name` is refused unless `trust` is True.
    """
    subject = load_subject(path, trust)
    findings = [check_neighbors(subject), check_membership(subject, shadows)]
    findings += [check_ownership(subject), check_inversion(subject)]
    if canaries:
        findings.append(check_canaries(subject, canaries))
    config = subject.federation.config
    caught = [finding.title.lower() for finding in findings if finding.leaks]
    private = dp_settings(config)
    lead = (
        f"Of {len(findings)} tests, {len(caught)} found something"
        + (f": {', '.join(caught)}. " if caught else ". ")
        + "A test that finds nothing proves nothing: it shows what this attack, on this run, could not do. "
        + (
            "The run had differential privacy."
            if private
            else "The run had no differential privacy, so nothing is promised."
        )
    )
    numbers = {
        "run": subject.path.resolve().name,
        "method": config.method,
        "rounds": subject.state.round,
        "version": __version__,
        "dp": private is not None,
        "shadows": shadows,
        "canaries": canaries,
        "findings": {
            finding.title: {"leaks": finding.leaks, "found": finding.found, **finding.numbers} for finding in findings
        },
    }
    page = subject.path / "audit.html"
    write_bytes(page, audit_page(f"{config.method} on {config.dataset}", lead, findings, subject.path).encode())
    write_json(subject.path / "audit.json", numbers)
    return Audit(page, findings, numbers)

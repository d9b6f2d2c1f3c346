"""The live page: the report's charts and style, with what is under way."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

from dynafed.engine.files import SAMPLES_NOW
from dynafed.engine.trust import resume_command
from dynafed.report import comparison, single
from dynafed.report.groups import group_runs
from dynafed.report.load import is_plain_file
from dynafed.report.measures import measure
from dynafed.report.page import CONTENTS, Page
from dynafed.report.sections import grid, learning_switches, notes, setup_line
from dynafed.report.text import duration, escape, plural
from dynafed.watch.status import Status

MOST_RUNS = 30
"""Runs that are listed; the newest are."""
MOST_CURVES = 12
"""Runs whose curves are drawn, unless more are running."""
MOST_SYNTHESES = 4
"""Runs whose synthetic samples are shown."""
MOST_PIXELS = 4_000_000
"""Of a picture that is shown."""


def run_id(path: Path) -> str:
    """A short name for a run in addresses."""
    return hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()


def live_page(found: Sequence[Status], paths: Sequence[Path]) -> Page:
    """The page of all runs, those that are running first."""
    where = ", ".join(map(str, paths))
    head = _headline(found)
    page = Page(f"{head} · dynafed watch", Path())
    setup = setup_line(found[0].run.config) if len(found) == 1 else ""
    page.add(
        f'<header><p class="eyebrow">dynafed watch · {escape(where)}</p><h1>{escape(head)}</h1>'
        f'<p class="setup">{escape(setup)}</p></header>',
        CONTENTS,
    )
    if not found:
        page.section("Runs", lead="No run is here yet. This page shows the first as soon as it begins.")
        return page
    cards = "".join(map(_card, found[:MOST_RUNS]))
    more = f'<p class="fine">and {len(found) - MOST_RUNS} older ones</p>' if len(found) > MOST_RUNS else ""
    page.section("Runs", f'<ul class="runs">{cards}</ul>{more}')
    running = sum(status.state == "running" for status in found)
    _learning(page, found[: max(MOST_CURVES, running)], len(found))
    _synthesis(page, [status for status in found if status.losses or status.pictures][:MOST_SYNTHESES])
    return page


def _headline(found: Sequence[Status]) -> str:
    if len(found) == 1:
        return _name(found[0])
    states = [status.state for status in found]
    said = [f"{states.count(state)} {state}" for state in ("running", "stopped", "done") if state in states]
    return ", ".join(said) or "Waiting for a run"


def _name(status: Status) -> str:
    config = status.run.config
    return f"{config.get('method', 'run')} on {config.get('dataset', 'unknown data')}"


def _card(status: Status) -> str:
    run, (done, planned) = status.run, status.rounds
    said = [f"round {done} of {planned}"]
    if status.iterations:
        said.append("synthesis, iteration {} of {}".format(*status.iterations))
    if status.state == "running":
        said.append(time_left(status))
    shown, values = measure(run.metric), run.values(run.metric)
    if values:
        best = f" (best {shown.show(run.best[1])})" if run.best else ""
        said.append(f"{shown.name} {shown.show(values[-1])}{best}")
    if status.state == "done":
        said.append(f"final {shown.name} {shown.show(run.final)}")
        said.append(f"in {duration((run.summary or {}).get('seconds') or run.total('seconds'))}")
    again = (
        f'<p class="command"><span>Go on with it</span><code>{escape(resume_command(run.path))}</code></p>'
        if status.state == "stopped"
        else ""
    )
    name = f"{_name(status)}, seed {run.config.get('seed', '?')}"
    return (
        f'<li class="{status.state}"><h3>{escape(name)} <span class="badge">{status.state}</span></h3>'
        f'<progress max="{planned}" value="{done}" aria-label="rounds of {escape(name)}"></progress>'
        f"<p>{' · '.join(escape(part) for part in said)}</p>{again}{notes(run)}"
        f'<p class="fine">{escape(run.path)} · <a href="run/{run_id(run.path)}">its whole report</a></p></li>'
    )


def time_left(status: Status) -> str:
    """How long a run will take yet, as far as its rounds so far tell."""
    if status.seconds_left is None:
        return "starting" if not status.run.rounds else "time left not known yet"
    seconds = status.seconds_left
    coarse = 5 * round(seconds / 5) if seconds > 60 else round(seconds)
    return f"{duration(coarse)} left" + (", and a synthesis" if status.synthesis_ahead else "")


def _learning(page: Page, shown: Sequence[Status], count: int) -> None:
    runs = [status.run for status in sorted(shown, key=lambda status: status.place)]  # so that colors stay
    groups = group_runs(runs)
    if len(runs) == 1:
        charts = single.learning_charts(page, runs[0], groups)
    else:
        charts = comparison.learning_charts(page, groups)
    lead = f"Of the {len(runs)} runs that changed last." if len(runs) < count else ""
    page.add(comparison.legend(groups))
    page.section("Learning", learning_switches(runs), grid(*charts), lead=lead)


def _synthesis(page: Page, shown: Sequence[Status]) -> None:
    parts = []
    for status in shown:
        name = f"{_name(status)}, seed {status.run.config.get('seed', '?')}"
        points = {number: loss for number, loss in status.losses.items() if number}
        line = {"name": "matching loss", "x": list(points), "y": list(points.values()), "color": 0}
        spec = {"kind": "lines", "xlabel": "iteration", "series": [line]} if points else None
        title = "Matching loss" if len(shown) == 1 else f"Matching loss of {name}"
        chart = page.chart(spec, title, "of the last synthesis, each iteration", better="lower", wide=True)
        files = [(f"iteration {iteration}", file) for iteration, file in status.pictures]
        if status.iterations and is_plain_file(status.run.path / SAMPLES_NOW):
            files.append(("now", status.run.path / SAMPLES_NOW))
        pictures = "".join(_figure(file, caption) for caption, file in files)
        sheet = page.images(f'<div class="images crisp">{pictures}</div>') if pictures else ""
        head = f"<h3>{escape(name)}</h3>" if len(shown) > 1 else ""
        parts.append(f"{head}{grid(chart)}{sheet}")
    lead = f"Synthetic samples of {plural(len(shown), 'run')}, from noise on, as they come into being." if parts else ""
    page.section("Synthetic data", *parts, lead=lead)


def _figure(file: Path, caption: str) -> str:
    """The picture with its caption; nothing if the file is no picture, or a huge one."""
    from PIL import Image

    try:
        with Image.open(file, formats=("PNG",)) as image:
            if image.width * image.height > MOST_PIXELS:
                return ""
            clean = io.BytesIO()
            image.convert("RGB").save(clean, "PNG")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    source = f"data:image/png;base64,{base64.b64encode(clean.getvalue()).decode()}"
    return f'<figure><img src="{source}" alt="synthetic samples, {caption}"><figcaption>{caption}</figcaption></figure>'

"""The page of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynafed.report import charts
from dynafed.report.clients import served_tables
from dynafed.report.groups import Group
from dynafed.report.load import LAST, Run
from dynafed.report.measures import REFINEMENT, extra_keys, measure
from dynafed.report.page import CONTENTS, Page
from dynafed.report.sections import (
    accuracy_parts,
    event_sentence,
    grid,
    learning_switches,
    notes,
    partition_parts,
    result_sentence,
    settings,
    setup_line,
    synthesis_parts,
)
from dynafed.report.text import THIN, duration, escape, join_limited, number, percent, plural, size

MOST_EVENTS = 500


def run_page(run: Run, base: Path) -> str:
    """The page of one run."""
    what = f"{run.config.get('method', 'run')} on {run.config.get('dataset', 'unknown data')}"
    page = Page(f"{what}: {measure(run.metric).show(run.final)}", base)
    badge = "" if run.finished else ' <span class="badge">unfinished</span>'
    page.add(
        f'<header><p class="eyebrow">dynafed · {escape(run.path.resolve().name)}</p><h1>{escape(what)}{badge}</h1>'
        f'<p class="verdict">{result_sentence(run)}</p>'
        f'<p class="setup">{escape(setup_line(run.config))}</p>{notes(run)}</header>'
    )
    page.add(_tiles(run), CONTENTS)
    alone = [Group(str(run.config.get("method", "run")), (run,))]
    extra = extra_keys([run])
    page.section("Learning", learning_switches([run]), grid(*learning_charts(page, run, alone)))
    synthesis = synthesis_parts(page, alone, extra.once, run)
    shown = page.blocks(run, "h3" if synthesis else "h2", gallery=any('class="gallery"' in part for part in synthesis))
    if synthesis:
        page.section("Synthetic data" if run.syntheses else "Measured now and then", *synthesis, shown)
    else:
        page.add(shown)
    page.section(
        "Who holds which classes" if run.partition else "Clients",
        *partition_parts(page, [("", run.partition)] if run.partition else []),
        accuracy_parts(page, alone, run.partition),
        served_tables(run, run.partition.names if run.partition else ()),
    )
    page.section(
        "Cost",
        grid(
            page.chart(charts.time_stack(run), "Time of each round", better="lower"),
            page.chart(charts.traffic_lines(run), "Traffic of each round", better="lower"),
        ),
        lead=_cost(run),
    )
    if run.rounds:
        page.section(
            "Events",
            grid(page.chart(charts.event_marks(run), "When", wide=True)),
            _event_table(run),
            lead=escape(event_sentence(run)),
        )
    if watched := charts.client_loss_lines(run):
        page.section(
            "Loss of watched clients",
            grid(
                *(page.chart(spec, f"Client {client}", better="lower", small=True) for client, spec in watched),
                style="small",
            ),
            lead="In each round: through the client’s own local training, where it took part; then of the average; "
            "then, at the round’s number, of the refined global model. All on one scale.",
        )
    page.section(
        "Other measures",
        grid(*(_small(page, run, key) for key in extra.varying), style="small"),
        _constants({key: value for key, value in extra.constant.items() if key != "lr"}),
    )
    if run.rounds:
        page.numbers = _numbers(run)
        page.section("Numbers", '<details class="numbers"><summary>Every round, as a table</summary></details>')
    page.section("Settings", settings(run))
    return page.html()


def _small(page: Page, run: Run, key: str) -> str:
    shown = measure(key)
    spec = charts.run_lines(run, {key: shown.name}, format=shown.format)
    return page.chart(spec, shown.name, shown.about, better=shown.better, small=True)


def learning_charts(page: Page, run: Run, alone: Sequence[Group]) -> list[str]:
    """Accuracy, or what a run has instead, and loss."""
    shown = measure(run.metric)
    marks = [{"y": run.target, "label": f"target {percent(run.target, 0)}"}] if run.target else []
    points = [{"x": run.best[0], "y": run.best[1], "label": f"best {shown.show(run.best[1])}"}] if run.best else []
    before = f"{run.metric}_before_refine"
    split = str(run.config.get("evaluate", "test"))
    held_out = split == "clients"
    at = charts.synthesis_marks(alone)
    names = {run.metric: shown.name, before: "before refinement"}
    metric = charts.run_lines(run, names, format=shown.format, marks=marks, points=points, xmarks=at)
    names = {"loss": f"{'held-out' if held_out else split} loss", "train_loss": "clients’ training loss"}
    loss = charts.run_lines(run, names, log="auto", xmarks=at)
    if metric is None and loss is None:
        return ['<p class="note">No round has been evaluated yet.</p>']
    note = "on what the clients hold out" if held_out else f"on the {split} split"
    note = f"{note}. {shown.about}" if shown.about else note
    note += f". {REFINEMENT}" if run.values(before) else ""
    return [page.chart(metric, shown.title, note, better=shown.better), page.chart(loss, "Loss", better="lower")]


def _tiles(run: Run) -> str:
    summary = run.summary or {}
    tiles = []
    shown = measure(run.metric)
    if run.final_std is not None:
        count = min(LAST, len(run.values(run.metric)))
        tiles.append(
            (
                f"Final {shown.name}" if run.finished else f"{shown.title} so far",
                shown.show(run.final),
                f"±{THIN}{shown.spread(run.final_std)} over the last {count}",
            )
        )
    if run.target:
        first = run.rounds_to_target
        tiles.append(("Reached the target", f"round {first}" if first else "never", f"of {percent(run.target, 0)}"))
    before = f"{run.metric}_before_refine"
    gains = [
        record[run.metric] - record[before]
        for record in run.rounds
        if record.get(run.metric) is not None and record.get(before) is not None
    ][-LAST:]
    if gains:
        gain = sum(gains) / len(gains)
        text = f"{100 * gain:+.2f}" if shown.format == "percent" else f"{gain:+.3g}"
        unit = "points, " if shown.format == "percent" else ""
        tiles.append(("Refinement adds", text.replace("-", "−"), f"{unit}over the last {len(gains)}"))
    if epsilon := run.values("epsilon"):
        delta = number(run.config.get("dp.delta"))
        tiles.append(("Privacy loss", f"ε{THIN}={THIN}{epsilon[-1]:.3g}", f"for each client, δ{THIN}={THIN}{delta}"))
    up, down = (summary.get(key) or run.total(key) for key in ("bytes_up", "bytes_down"))
    if up or down:
        tiles.append(("Traffic", size((up or 0) + (down or 0)), f"{size(up)} up, {size(down)} down"))
    if summary.get("parameters"):
        tiles.append(("Parameters", number(summary["parameters"]), "in the model"))
    if summary.get("peak_rss_mb"):
        tiles.append(("Peak memory", size(1e6 * summary["peak_rss_mb"]), "resident"))
    inside = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in tiles
    )
    return f'<dl class="tiles" style="--n:{len(tiles)}">{inside}</dl>' if tiles else ""


def _cost(run: Run) -> str:
    times = (*charts.TIMES, ("seconds_synthesis", "synthesis"))
    took = [(name, run.total(key)) for key, name in times]
    timed = [(name, total) for name, total in took if total]
    whole = sum(total for _, total in timed)
    said = [f"{name} {duration(total)} ({percent(total / whole, 0)})" for name, total in timed]
    text = f"Time: {', '.join(said)}." if said else ""
    if run.total("seconds_synthesis"):
        text += f" The synthesis, in round {join_limited(run.syntheses)}, stands apart from the chart."
    up, down = run.mean("bytes_up"), run.mean("bytes_down")
    if up is not None or down is not None:
        text += f" Traffic a round: {size(up)} up, {size(down)} down."
    return text.strip()


def _event_table(run: Run) -> str:
    rows = []
    for record in run.rounds:
        said = []
        if record.get("dropped"):
            said.append(f"dropped: {join_limited(record['dropped'])}")
        for entry in record.get("rejected") or ():
            known = isinstance(entry, dict)
            who, why = (entry.get("client"), entry.get("reason")) if known else (entry, "no reason given")
            said.append(f"rejected client {who}: {why}")
        if record.get("repeats"):
            said.append(f"repeated {plural(int(record['repeats']), 'time')}")
        if record.get("skipped"):
            said.append("skipped: the model was kept")
        if record.get("synthesis_refused"):
            said.append(f"synthesis not used: {record['synthesis_refused']}")
        if record.get("restarted"):
            said.append("restarted from the initial model")
        if "not finite" in charts.count_events(record):
            said.append("loss not finite")
        if said:
            rows.append(f'<tr><td class="num">{record["round"]}</td><td>{escape("; ".join(said))}</td></tr>')
    if not rows:
        return ""
    more = f'<p class="fine">and {len(rows) - MOST_EVENTS} more rounds</p>' if len(rows) > MOST_EVENTS else ""
    return (
        f"<details><summary>{plural(len(rows), 'round')} with events</summary>"
        '<div class="scroll" tabindex="0" role="region" aria-label="events"><table class="events"><thead><tr>'
        '<th scope="col" class="num">Round</th><th scope="col">What happened</th></tr></thead>'
        f"<tbody>{''.join(rows[:MOST_EVENTS])}</tbody></table></div>{more}</details>"
    )


def _numbers(run: Run) -> dict[str, Any]:
    """Every number of every round, for the table that is built when it is opened."""
    keys = {
        key: None
        for record in run.rounds
        for key, value in record.items()
        if (isinstance(value, int | float) and not isinstance(value, bool)) or value is None
    }
    counted = [key for key in ("clients", "dropped", "rejected") if any(record.get(key) for record in run.rounds)]
    return {
        "columns": [*keys, *counted],
        "rows": [
            [*(record.get(key) for key in keys), *(len(record.get(key) or ()) for key in counted)]
            for record in run.rounds
        ],
    }


def _constants(values: Mapping[str, float]) -> str:
    said = join_limited((f"{key} = {number(value)}" for key, value in values.items()), 40)
    return f'<p class="fine">The same in every round: {escape(said)}.</p>' if values else ""

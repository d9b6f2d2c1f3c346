"""Sections that both pages share, as HTML that reads without scripts; `page.js` draws the charts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dynafed.progress import METRICS
from dynafed.report import charts
from dynafed.report.gallery import class_gallery
from dynafed.report.groups import Group, label_skew
from dynafed.report.load import Partition, Run
from dynafed.report.measures import D_SYN, measure, once_table
from dynafed.report.page import Page
from dynafed.report.text import THIN, duration, escape, number, percent, plural, setting

MOST_HEATS = 6
SMOOTHED_FROM = 20
"""Rounds from which on curves can be smoothed."""


def result_sentence(run: Run) -> str:
    """What came out of a run, in a sentence."""
    planned = run.config.get("rounds")
    done = len(run.rounds)
    shown = measure(run.metric)
    if run.final is None:
        return f"No accuracy yet; {done} of {escape(planned)} rounds done."
    if run.finished:
        took = (run.summary or {}).get("seconds") or run.total("seconds")
        first = f"<b>{shown.show(run.final)}</b> final {shown.name}"
        last = plural(done, "round") + (f" in {duration(took)}" if took else "")
    else:
        first = f"<b>{shown.show(run.final)}</b> {shown.name} so far"
        last = f"{done} of {escape(planned)} rounds done"
        last += f" in {duration(run.total('seconds'))}" if run.total("seconds") else ""
    best = f"; best <b>{shown.show(run.best[1])}</b> in round {run.best[0]}" if run.best else ""
    return f"{first}{best}; {last}."


def setup_line(config: Mapping[str, Any]) -> str:
    """The setting in one line, from whichever keys are given."""
    said = []
    if "model" in config:
        said.append(f"model {config['model']}")
    if "partition" in config:
        key = {"dirichlet": "alpha", "shards": "classes_per_client"}.get(str(config["partition"]).split("-")[0], "")
        said.append(str(config["partition"]) + (f", {key} = {config[key]}" if key in config else ""))
    if "clients" in config:
        sampled = config.get("clients_per_round") or config.get("participation", 0) * config["clients"]
        said.append(
            f"{plural(config['clients'], 'client')}" + (f", {max(1, round(sampled))} a round" if sampled else "")
        )
    if config.get("local_steps"):
        said.append(f"{plural(config['local_steps'], 'local step')}")
    elif "local_epochs" in config:
        said.append(f"{plural(config['local_epochs'], 'local epoch')}")
    if "batch_size" in config:
        said.append(f"batches of {config['batch_size']}")
    if "optimizer" in config:
        said.append(f"{config['optimizer']}" + (f", lr = {config['lr']}" if "lr" in config else ""))
    if "seed" in config:
        said.append(f"seed {config['seed']}")
    return " · ".join(part.replace(" ", "\u00a0") for part in said)


def partition_parts(page: Page, found: Sequence[tuple[str, Partition]]) -> list[str]:
    """The heat maps of some partitions, each with its name, and what they say."""
    if not found:
        return []
    several = len(found) > 1
    lead = (
        f"Beside each name: how many classes hold 90{THIN}% of a client’s samples, at the median over clients."
        if several
        else _skew_sentence(found[0][1])
    )
    parts = [f'<p class="lead">{lead}</p>']
    shown = [
        page.chart(
            charts.partition_map(partition),
            name or f"{plural(len(partition.shown), 'client')} × {plural(partition.classes, 'class', 'classes')}",
            _skew_short(partition) if several else "",
            wide=not several,
            small=several,
        )
        for name, partition in found
    ]
    parts.append(
        '<p class="heat-key"><span>share of the client’s samples: 0</span><i aria-hidden="true"></i>'
        '<span>a quarter</span><i aria-hidden="true"></i><span>all</span>'
        "</p>" + _switch("clients in order of", "order", {"main": "main class", "id": "number"}, "order of the clients")
    )
    style = "small" if len(found) > 2 else ""
    parts.append(grid(*shown[:MOST_HEATS], style=style))
    if rest := shown[MOST_HEATS:]:
        parts.append(
            f"<details><summary>{plural(len(rest), 'more partition')}</summary>{grid(*rest, style=style)}</details>"
        )
    return parts


def _skew_sentence(partition: Partition) -> str:
    told = label_skew(partition)
    sample = (
        f" Of {number(partition.clients)} clients, {len(partition.shown)} are shown."
        if partition.clients > len(partition.shown)
        else ""
    )
    sizes = (
        f"Every client holds {number(told['smallest'])} samples."
        if told["smallest"] == told["largest"]
        else f"Clients hold {number(told['smallest'])} to {number(told['largest'])} samples, "
        f"{told['middle']:g} at the median."
    )
    return (
        f"At the median, <b>{told['classes']:g} of {partition.classes} classes</b> hold 90{THIN}% of a client’s "
        f"samples (with evenly spread classes it would be {told['even']}), and the largest class alone holds "
        f"{percent(told['main'], 0)}. {sizes}{sample}"
    )


def _skew_short(partition: Partition) -> str:
    return f"90{THIN}% in {label_skew(partition)['classes']:g} of {partition.classes} classes"


def event_sentence(run: Run) -> str:
    """What went wrong in a run, in a sentence."""
    seen = [charts.count_events(record) for record in run.rounds]
    rounds = {name: sum(name in count for count in seen) for name in charts.EVENTS}
    times = {name: sum(count.get(name, 0) for count in seen) for name in charts.EVENTS}
    said = {
        "dropped": f"{plural(times['dropped'], 'update')} never came, in {plural(rounds['dropped'], 'round')}",
        "rejected": f"{plural(times['rejected'], 'update')} rejected",
        "repeated": f"{plural(rounds['repeated'], 'round')} repeated",
        "skipped": f"{plural(rounds['skipped'], 'round')} skipped",
        "not finite": f"loss not finite in {plural(rounds['not finite'], 'round')}",
    }
    if not any(rounds.values()):
        return "No client dropped out, no update was rejected, no round was repeated or skipped."
    text = "; ".join(words for name, words in said.items() if rounds[name])
    return text[0].upper() + text[1:] + "."


def settings(run: Run, mark: Sequence[str] = ()) -> str:
    """How to run it again, with what it was made, and its whole config."""
    rows = "".join(
        f"<div{' class=differs' if key in mark else ''}><dt>{escape(key)}</dt><dd>{escape(setting(value))}</dd></div>"
        for key, value in run.config.items()
    )
    again = f"dynafed run {shlex.quote(str(run.path / 'config.toml'))}"
    go_on = f"dynafed resume {shlex.quote(str(run.path))}"
    parts = [f'<p class="command"><span>Run it again</span><code>{escape(again)}</code></p>']
    if not run.finished:
        parts.append(f'<p class="command"><span>Go on with it</span><code>{escape(go_on)}</code></p>')
    versions = (run.summary or {}).get("versions")
    if isinstance(versions, dict):
        parts.append(f'<p class="fine">Made with {escape(", ".join(f"{k} {v}" for k, v in versions.items()))}.</p>')
    parts.append(
        f"<details><summary>The whole config, {plural(len(run.config), 'key')}</summary>"
        f'<dl class="config">{rows}</dl></details>'
    )
    return "".join(parts)


def notes(run: Run, prefix: str = "") -> str:
    """What of a run could not be read."""
    return "".join(f'<p class="note">{escape(prefix + note)}.</p>' for note in run.notes)


def grid(*parts: str, style: str = "") -> str:
    """Charts side by side; nothing if there are none."""
    inside = "".join(parts)
    return f'<div class="grid {style}">{inside}</div>' if inside else ""


def learning_switches(runs: Sequence[Run], axes: Sequence[str] = ()) -> str:
    """The switches of the learning curves: the horizontal axis, if there is a choice, and smoothing."""
    names = {"round": "rounds", "traffic": "traffic", "time": "time of clients and server"}
    against = _switch("against", "axis", {axis: names[axis] for axis in ("round", *axes)}, "horizontal axis")
    long = max((len(run.rounds) for run in runs), default=0) >= SMOOTHED_FROM
    smooth = _switch("smoothed over", "smooth", {"1": "one round", "5": "5", "15": "15"}, "smoothing") if long else ""
    return f'<div class="switches">{against if axes else ""}{smooth}</div>' if axes or smooth else ""


def synthesis_parts(
    page: Page, groups: Sequence[Group], once: Sequence[str], show: Run | None, whose: str = ""
) -> list[str]:
    """The synthetic images of the run `show` (named `whose`), and what was measured in few rounds, as a table."""
    gallery = page.images(class_gallery(show)) if show is not None else ""
    table = once_table(groups, once)
    if not gallery and not table:
        return []
    made = any(run.syntheses for group in groups for run in group.runs)
    text = f"{D_SYN} {whose}" if gallery and whose else D_SYN
    lead = f'<p class="lead">{escape(text)}</p>' if made or gallery else ""
    return [lead, gallery, table and f"<h3>Its numbers</h3>{table}"]


def accuracy_parts(page: Page, groups: Sequence[Group], partition: Partition | None) -> str:
    """Accuracy by class, and that or another metric by client, where it was measured."""
    by_class = charts.class_bars(groups, partition.names if partition else ())
    by_client = [(measure(metric), charts.client_lines(groups, metric)) for metric in METRICS]
    return grid(
        page.chart(by_class, "Accuracy by class", "as last measured", better="higher", wide=True),
        *(
            page.chart(spec, f"{shown.title} by client", "as last measured", better=shown.better, wide=True)
            for shown, spec in by_client
        ),
    )


def _switch(text: str, key: str, choices: Mapping[str, str], label: str) -> str:
    buttons = "".join(
        f'<button type="button" data-{key}="{value}" aria-pressed="{str(place == 0).lower()}">{name}</button>'
        for place, (value, name) in enumerate(choices.items())
    )
    return f'<p class="switch" role="group" aria-label="{label}">{text} {buttons}</p>'

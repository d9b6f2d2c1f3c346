"""The page of several runs: groups of seeds against each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dynafed.report import blocks, charts
from dynafed.report.groups import Group, common_round, common_settings, differing_keys, group_runs, partitions
from dynafed.report.load import LAST, Run
from dynafed.report.measures import extra_keys, measure, segment_table
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
from dynafed.report.text import NONE, duration, escape, join_limited, percent, plural, setting, size

TASK = ("dataset", "evaluate", "loss", "partition", "alpha", "classes_per_client", "clients", "server_samples")
"""Runs that differ in one of these solve different tasks: their accuracies aren't ranked against each other."""

MOST_TASKS = 8

Scored = tuple[float, float | None, Group]
"""A group's mean and standard deviation over seeds."""

BASELINE = "fedavg"
"""The method that the others are compared with."""


def compare_page(runs: Sequence[Run], base: Path) -> str:
    """The page of several runs."""
    groups = group_runs(runs)
    same = common_settings([run.config for run in runs])
    where = f" on {same['dataset']}" if "dataset" in same else ""
    what = f"{plural(len(groups), 'method' if _only_methods(groups) else 'setting')}{where}"
    if len(groups) == 1:
        what = f"{groups[0].label}{where}, {plural(len(runs), 'seed')}"
    page = Page(f"{what}: dynafed report", base)
    unfinished = sum(not run.finished for run in runs)
    badge = f' <span class="badge">{unfinished} of {len(runs)} runs unfinished</span>' if unfinished else ""
    left_out = "".join(notes(run, f"{run.path.name}: ") for run in runs)
    page.add(
        f'<header><p class="eyebrow">dynafed · {escape(plural(len(runs), "run"))}</p><h1>{escape(what)}{badge}</h1>'
        f"{_ranking(groups)}"
        f'<p class="setup">{escape(setup_line(same))}</p>{left_out}</header>'
    )
    page.add(CONTENTS, legend(groups))
    page.section("Results", _result_table(groups), f'<p class="fine">{escape(_fine_print(groups))}</p>')
    page.section("Learning", learning_switches(runs, _axes(groups)), grid(*learning_charts(page, groups)))
    extra = extra_keys(runs)
    show = _to_show(groups)
    whose = f"Shown is that of {show.config.get('method')}, seed {show.config.get('seed')}." if show else ""
    synthesis = synthesis_parts(page, groups, extra.once, show, whose)
    page.section("Synthetic data", *synthesis, segment_table(groups, extra.once))
    found = partitions(runs)
    page.section(
        "Who holds which classes" if found else "Clients",
        *partition_parts(page, found),
        accuracy_parts(page, groups, found[0][1] if found else None),
    )
    page.section("Cost of a round", _cost_bars(groups))
    keys = [*(f"{metric}_before_refine" for metric in _metrics(groups)), "train_loss", *extra.varying]
    page.section("Other measures", grid(*(_small(page, groups, key) for key in keys), style="small"))
    page.section("Runs", *_run_details(page, groups, show))
    return page.html()


def _to_show(groups: Sequence[Group]) -> Run | None:
    """The run whose synthetic images are shown: of the best group that has some, the first seed."""
    having = [
        (_sign(group) * (group.over_seeds(lambda run: run.final)[0] or 0), run)
        for group in groups
        for run in group.distinct
        if (run.path / "synthetic.safetensors").is_file()
    ]
    return max(having, key=lambda entry: entry[0])[1] if having else None


def _small(page: Page, groups: Sequence[Group], key: str) -> str:
    shown = measure(key)
    spec = charts.group_lines(groups, key, format=shown.format)
    return page.chart(spec, shown.name, shown.about, better=shown.better, small=True)


def learning_charts(page: Page, groups: Sequence[Group]) -> list[str]:
    """Accuracy, or what the runs have instead, and loss: a curve for each group."""
    targets = {run.target for group in groups for run in group.runs}
    target = targets.pop() if len(targets) == 1 else None
    marks = [{"y": target, "label": f"target {percent(target, 0)}"}] if target else []
    at = charts.synthesis_marks(groups)
    parts = []
    for metric in _metrics(groups):
        shown, aims = measure(metric), marks if metric == "accuracy" else []
        spec = charts.group_lines(groups, metric, format=shown.format, marks=aims, xmarks=at, direct=True)
        note = ". ".join(filter(None, (_band_note(groups), shown.about)))
        parts.append(page.chart(spec, shown.title, note, better=shown.better, wide=True))
    loss = charts.group_lines(groups, "loss", log="auto", xmarks=at, direct=True)
    return [*parts, page.chart(loss, "Loss", better="lower", wide=True)]


def _ranking(groups: Sequence[Group]) -> str:
    """Who ends highest, by how much, and whether the seeds say so; one line for each task."""
    keys = [key for key in differing_keys([group.runs[0].config for group in groups]) if key in TASK]
    tasks: dict[str, list[Group]] = {}
    for group in groups:
        config = group.runs[0].config
        said = [f"{key}={setting(config[key])}" for key in keys if key in config]
        said += [measure(group.metric).name] if len(_metrics(groups)) > 1 else []
        short = group.label
        for part in said:
            short = short.replace(f", {part}", "")
        tasks.setdefault(", ".join(said), []).append(replace(group, label=short))
    if len(tasks) == 1:
        text = _leader(groups)
        return f'<p class="verdict">{text}</p>'
    lines = [f"<li>{escape(task)}: {_leader(inside)}</li>" for task, inside in tasks.items()]
    more = f"<li>and {len(lines) - MOST_TASKS} more</li>" if len(lines) > MOST_TASKS else ""
    return f'<ul class="verdict">{"".join(lines[:MOST_TASKS])}{more}</ul>'


def _leader(groups: Sequence[Group]) -> str:
    """Who ends highest, by how much above the baseline (FedAvg, if it is there) and above the next."""
    at = common_round(groups)
    scored = [(*group.over_seeds(lambda run: run.final_at(at)), group) for group in groups]
    ranked = sorted(((m, s, g) for m, s, g in scored if m is not None), key=lambda entry: -_sign(entry[2]) * entry[0])
    if not ranked:
        return "no accuracy yet."
    shown = measure(ranked[0][2].metric)
    mean, std, top = ranked[0]
    so_far = "" if all(group.finished for group in groups) else " so far"
    over = f"over {plural(len(top.distinct), 'seed')}" if len(top.distinct) > 1 else "with one seed"
    score = _own(top, shown.show_mean(mean, std))
    if len(groups) == 1:
        return f"{score} final {shown.name}{so_far} {over}."
    baseline = next((entry for entry in ranked if entry[2].runs[0].config.get("method") == BASELINE), None)
    rivals = [entry for entry in (baseline, *ranked[1:2]) if entry is not None and entry[2] is not top]
    if baseline is not None and len(rivals) > 1 and rivals[0] is rivals[1]:
        rivals.pop()
    if rivals and rivals[0][0] == mean:
        text = f"{_own(top)} and {_own(rivals[0][2])} end equal{so_far}: {score} {over}"
    else:
        leads = [_lead(mean, entry, "baseline" if entry is baseline else "") for entry in rivals]
        score += "" if shown.format == "percent" else f" {shown.name}"
        place = "highest" if _sign(top) > 0 else "lowest"
        text = f"{_own(top)} {'is' if at else 'ends'} {place}{so_far}: {score} {over}"
        text += f", {' and '.join(leads)}{_doubt(ranked[0], rivals)}" if leads else ""
    if at is not None:
        text += f"; compared at round {at}, the last that every run has"
    counts = {entry[2].label: len(entry[2].distinct) for entry in ranked}
    if len(set(counts.values())) > 1:
        said = join_limited((f"{label} {count}" for label, count in counts.items()), 4)
        text += f"; the numbers of seeds differ: {escape(said)}"
    return text + "."


def _lead(mean: float, rival: Scored, role: str) -> str:
    other, other_std, group = rival
    shown = measure(group.metric)
    inside = f"{role + ', ' if role else ''}{shown.show_mean(other, other_std)}"
    return f"{shown.points(abs(mean - other))} {'above' if mean > other else 'below'} {_own(group)} ({inside})"


def _doubt(top: Scored, rivals: Sequence[Scored]) -> str:
    """What the seeds don't tell about the leads over `rivals`."""
    if any(entry[1] is None for entry in (top, *rivals)):
        return "; one seed doesn’t tell how sure that is"
    unsure = [entry for entry in rivals if abs(top[0] - entry[0]) < (top[1] or 0) + (entry[1] or 0)]
    if not unsure:
        return ""
    whole = "that lead is" if len(rivals) == 1 else "both leads are"
    said = whole if len(unsure) == len(rivals) else f"the lead over {_own(unsure[0][2])} is"
    return f"; {said} within the spread of the seeds"


def _own(group: Group, text: str = "") -> str:
    """Text in the group's color; without one, its name."""
    return f'<b class="own" style="{_color(group.place)}">{text or escape(group.label)}</b>'


def legend(groups: Sequence[Group]) -> str:
    """The groups' names, each a button that hides its curves."""
    keys = "".join(
        f'<button type="button" class="key" data-group="{place}" aria-pressed="true" style="{_color(place)}">'
        f'<i class="d{place // 8 % 3}" aria-hidden="true"></i>{escape(group.label)}</button>'
        for place, group in enumerate(groups)
    )
    hint = '<span class="hint">click to hide, double-click to see one alone</span>'
    return f'<div class="legend" role="group" aria-label="curves">{keys}{hint}</div>' if len(groups) > 1 else ""


def _result_table(groups: Sequence[Group]) -> str:
    aim = any(run.target for group in groups for run in group.runs)
    at = common_round(groups)
    synthesis = any(run.total("seconds_synthesis") for group in groups for run in group.runs)
    columns = [("Setting", False), ("Seeds", False), *([(f"At round {at}", True)] if at else [])]
    metrics = _metrics(groups)
    final = f"Final {measure(metrics[0]).name}" if len(metrics) == 1 else "Final result"
    columns += [(final, True), ("Best", True)]
    columns += [("Rounds to target", True)] if aim else []
    columns += [("Up a round", True), ("Down a round", True), ("Server a round", True), ("All clients a round", True)]
    columns += [("Synthesis, once", True)] if synthesis else []
    rows = []
    for place, group in enumerate(groups):
        shown = measure(group.metric)
        mean, std = group.over_seeds(lambda run: run.final)
        best, _ = group.over_seeds(lambda run: run.best[1] if run.best else None)
        done = "" if group.finished else ' <span class="badge">unfinished</span>'
        swatch = f'<i class="swatch d{place // 8 % 3}" style="{_color(place)}" aria-hidden="true"></i>'
        row: list[tuple[str, Any]] = [
            (f"{swatch}{escape(group.label)}{done}", group.label),
            (escape(f"{len(group.seeds)} ({join_limited(group.seeds)})"), len(group.seeds)),
            *([_cell_at(group, at)] if at else []),
            (f"<b>{shown.show_mean(mean, std)}</b>", mean),
            (shown.show(best), best),
        ]
        if aim:
            row.append(_reached(group))
        for key in ("bytes_up", "bytes_down"):
            row.append(_cell(group, key, size))
        for key in ("seconds_server", "seconds_clients"):
            row.append(_cell(group, key, duration))
        if synthesis:
            once = _synthesis_seconds(group)
            row.append((duration(once), once))
        rows.append(row)
    down = not all(group.lower_is_better for group in groups)
    rows.sort(key=lambda row: (row[2][1] is None, (row[2][1] or 0) * (-1 if down else 1)))
    return blocks.sortable_table(
        [(escape(name), numeric) for name, numeric in columns],
        rows,
        style="results cards",
        sorted_by=2,
        down=down,
        label="results",
    )


def _cell_at(group: Group, at: int) -> tuple[str, float | None]:
    mean, std = group.over_seeds(lambda run: run.final_at(at))
    return f"<b>{measure(group.metric).show_mean(mean, std)}</b>", mean


def _synthesis_seconds(group: Group) -> float | None:
    return group.over_seeds(lambda run: run.total("seconds_synthesis"))[0]


def _cell(group: Group, key: str, show: Any) -> tuple[str, float | None]:
    mean = _mean_per_round(group, key)
    return show(mean), mean


def _mean_per_round(group: Group, key: str) -> float | None:
    return group.over_seeds(lambda run: run.mean(key))[0]


def _reached(group: Group) -> tuple[str, float | None]:
    mean, _ = group.over_seeds(lambda run: run.rounds_to_target)
    hits = sum(run.rounds_to_target is not None for run in group.distinct)
    if mean is None:
        return ("not reached" if any(run.target for run in group.runs) else NONE), None
    return f"{mean:.0f}" + (f" ({hits} of {len(group.distinct)})" if hits < len(group.distinct) else ""), mean


def _fine_print(groups: Sequence[Group]) -> str:
    metrics = _metrics(groups)
    what = "Final results are" if len(metrics) > 1 else f"Final {measure(metrics[0]).name} is"
    text = f"{what} the mean of the last {LAST} evaluated rounds of each run"
    if any(len(group.distinct) > 1 for group in groups):
        text += "; then mean ± sample standard deviation over seeds. Best is the mean of the seeds’ best rounds"
    text += ". Times are wall clock on the machine of the run."
    if any(len(group.distinct) < len(group.runs) for group in groups):
        text += " Runs that share setting and seed have one result: the longest counts."
    if any(not group.finished for group in groups):
        text += " Unfinished runs count with what they have so far."
    return text


def _band_note(groups: Sequence[Group]) -> str:
    sizes = {len(group.distinct) for group in groups}
    if max(sizes) == 1:
        return ""
    bands = ["± one standard deviation"] if max(sizes) > 2 else []
    bands += ["the range of two seeds"] if 2 in sizes else []
    return f"mean over seeds; band: {' or '.join(bands)}"


def _axes(groups: Sequence[Group]) -> list[str]:
    """What the curves can be drawn against besides rounds."""
    runs = [run for group in groups for run in group.runs]
    return [axis for axis, keys in charts.AXES.items() if all(run.values(key) for run in runs for key in keys)]


def _cost_bars(groups: Sequence[Group]) -> str:
    means = [[_mean_per_round(group, key) or 0 for key, _ in charts.TIMES] for group in groups]
    longest = max(map(sum, means))
    if not longest:
        return ""
    rows = []
    for group, parts in zip(groups, means, strict=True):
        bars = "".join(
            f'<i style="width:{100 * value / longest:.2f}%;{_color(place)}" title="{name} {duration(value)}"></i>'
            for place, ((_, name), value) in enumerate(zip(charts.TIMES, parts, strict=True))
            if value
        )
        rows.append(
            f'<tr><th scope="row">{escape(group.label)}</th><td class="bar"><span>{bars}</span></td>'
            f'<td class="num">{duration(sum(parts))}'
            + (f" <small>+ {duration(once)} synthesis, once</small>" if (once := _synthesis_seconds(group)) else "")
            + "</td></tr>"
        )
    key = "".join(
        f'<span style="{_color(place)}"><i aria-hidden="true"></i>{name}</span>'
        for place, (_, name) in enumerate(charts.TIMES)
        if any(parts[place] for parts in means)
    )
    return f'<p class="bar-key">{key}</p><table class="bars">{"".join(rows)}</table>'


def _run_details(page: Page, groups: Sequence[Group], show: Run | None) -> list[str]:
    runs = [run for group in groups for run in group.runs]
    marked = differing_keys([run.config for run in runs])
    parts = []
    for group in groups:
        for run in group.runs:
            relative = os.path.relpath(run.path, page.base)
            own = "report.html" if (run.path / "report.html").is_file() else ""
            link = f'<a href="{escape(quote(os.path.join(relative, own)))}">{escape(relative)}</a>'
            badge = "" if run.finished else ' <span class="badge">unfinished</span>'
            extra = page.blocks(run, "h3", gallery=run is show and any("gallery" in part for part in page.parts))
            parts.append(
                f"<details><summary>{escape(group.label)}, seed {escape(run.config.get('seed', '?'))}: "
                f"{measure(run.metric).show(run.final)}{badge}</summary>"
                f"<p>{result_sentence(run)} {escape(event_sentence(run))} Folder: {link}</p>"
                f"{settings(run, mark=marked)}{extra}</details>"
            )
    return parts


def _metrics(groups: Sequence[Group]) -> list[str]:
    """What the groups are measured by."""
    return list(dict.fromkeys(group.metric for group in groups))


def _sign(group: Group) -> int:
    """What makes larger better."""
    return -1 if group.lower_is_better else 1


def _color(place: int) -> str:
    return f"--c:var(--c{place % 8})"


def _only_methods(groups: Sequence[Group]) -> bool:
    return len({group.runs[0].config.get("method") for group in groups}) == len(groups)

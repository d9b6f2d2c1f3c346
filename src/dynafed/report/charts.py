"""What `page.js` draws, as plain data: one dict per chart, made from runs or groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynafed.report.groups import Group, cumulative, mean_curve, mean_std
from dynafed.report.load import Partition, Run
from dynafed.report.text import plural

Spec = dict[str, Any]

AXES = {"traffic": ("bytes_up", "bytes_down"), "time": ("seconds_local", "seconds_server")}
"""What a curve can be drawn against besides rounds: sums over all rounds so far; a synthesis adds its time."""

TIMES = (("seconds_local", "clients"), ("seconds_server", "server"), ("seconds_eval", "evaluation"))


def run_lines(run: Run, names: dict[str, str], **more: Any) -> Spec | None:
    """Lines over rounds for the measures (by key, with a name) that the run has; the first is the main one."""
    series = []
    for place, (key, name) in enumerate(names.items()):
        if run.values(key):
            x, y = zip(*run.points(key), strict=True)
            series.append({"name": name, "x": x, "y": y, "color": place, "thin": place > 0})
    return {"kind": "lines", "xlabel": "round", "series": series, **more} if series else None


def group_lines(groups: Sequence[Group], key: str, **more: Any) -> Spec | None:
    """One curve a group, the mean over seeds with its band."""
    series = []
    for place, group in enumerate(groups):
        joined = mean_curve(run.points(key) for run in group.distinct)
        if not joined.rounds:
            continue
        line: Spec = {"name": group.label, "x": joined.rounds, "y": joined.mean, "color": place, "group": place}
        if len(group.distinct) > 1:
            line |= {"low": joined.low, "high": joined.high, "n": joined.count, "of": len(group.distinct)}
        series.append(line | {"alt": _alternatives(group, joined.rounds)})
    return {"kind": "lines", "xlabel": "round", "series": series, **more} if series else None


def synthesis_marks(groups: Sequence[Group]) -> list[Spec]:
    """Vertical marks at the rounds that made synthetic data, one for each round."""
    places: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        for round_num in sorted({at for run in group.distinct for at in run.syntheses}):
            places.setdefault(round_num, []).append(place)
    # A mark of several groups goes away only with the last of them.
    return [{"x": at, "label": "synthesis", "groups": found} for at, found in sorted(places.items())]


def class_bars(groups: Sequence[Group], names: Sequence[str]) -> Spec | None:
    """Accuracy of each class, as last measured; the mean over seeds of each group."""
    series: list[Spec] = []
    most = 0
    for place, group in enumerate(groups):
        rows = [row for run in group.distinct if isinstance(row := run.last("accuracy_per_class"), list)]
        if rows and len({len(row) for row in rows}) == 1:
            means = [mean_std([v for v in column if v is not None])[0] for column in zip(*rows, strict=True)]
            series.append({"name": group.label, "y": means, "color": place})
            most = max(most, len(means))
    if not series:
        return None
    labels = list(names) if len(names) == most else [str(index) for index in range(most)]
    series = [line | {"y": line["y"] + [None] * (most - len(line["y"]))} for line in series]
    return {"kind": "bars", "labels": labels, "series": series, "format": "percent", "xlabel": "class", "ymax": 1}


def client_lines(groups: Sequence[Group], metric: str = "accuracy") -> Spec | None:
    """A metric on each client's data, as last measured, from the lowest client to the highest; mean over seeds."""
    series = []
    for place, group in enumerate(groups):
        rows = [
            sorted(value for value in row.values() if value is not None)
            for run in group.distinct
            if isinstance(row := run.last(f"{metric}_per_client"), dict)
        ]
        if rows and len({len(row) for row in rows}) == 1 and rows[0]:
            y = [mean_std(column)[0] for column in zip(*rows, strict=True)]
            series.append({"name": group.label, "x": list(range(1, len(y) + 1)), "y": y, "color": place})
    kind = "percent" if metric == "accuracy" else "number"
    spec = {"kind": "lines", "xlabel": "clients, lowest first", "format": kind, "zero": True, "series": series}
    return spec if series else None


def client_loss_lines(run: Run) -> list[tuple[str, Spec]]:
    """A chart for each watched client, all on one scale.

    In each round: the losses of local training (if the client took part), after the average, after the refinement.
    """
    clients = sorted(
        {key.split(".")[1] for record in run.rounds for key in record if key.startswith("watch.")}, key=int
    )
    found: list[tuple[str, Spec]] = []
    for client in clients:
        points: list[tuple[float, float]] = []
        for record in run.rounds:
            round_num, local = record["round"], record.get(f"watch.{client}.local") or []
            points += [(round_num - 1 + 0.8 * (step + 1) / len(local), loss) for step, loss in enumerate(local)]
            for when, name in ((round_num - 0.1, "aggregated"), (round_num, "refined")):
                if (loss := record.get(f"watch.{client}.{name}")) is not None:
                    points.append((when, loss))
        x, y = zip(*points, strict=True) if points else ((), ())
        line = {"name": f"client {client}", "x": x, "y": y, "color": 0, "thin": True}
        found.append((client, {"kind": "lines", "xlabel": "round", "zero": True, "series": [line]}))
    tops = sorted(value for _, spec in found for value in spec["series"][0]["y"] if value is not None)
    for _, spec in found:
        spec["ymax"] = tops[int(0.99 * (len(tops) - 1))] if tops else 1
    return found


def time_stack(run: Run) -> Spec | None:
    """Seconds of each round without the synthesis, stacked by where they went."""
    kept = [record for record in run.rounds if any(record.get(key) is not None for key, _ in TIMES)]
    if not kept:
        return None
    series = [
        {"name": name, "y": [record.get(key) or 0 for record in kept], "color": place}
        for place, (key, name) in enumerate(TIMES)
        if run.total(key)
    ]
    parts = [*(key for key, _ in TIMES), "seconds_synthesis"]
    rest = [max(0.0, (r.get("seconds") or 0) - sum(r.get(key) or 0 for key in parts)) for r in kept]
    if sum(rest) > 0.02 * sum(r.get("seconds") or 0 for r in kept):
        series.append({"name": "other", "y": rest, "color": 6})
    return {"kind": "stack", "x": [r["round"] for r in kept], "format": "seconds", "xlabel": "round", "series": series}


def traffic_lines(run: Run) -> Spec | None:
    """Bytes of each round, where they vary."""
    if not any(len(set(run.values(key))) > 1 for key in ("bytes_up", "bytes_down")):
        return None
    names = {"bytes_up": "up, from the clients", "bytes_down": "down, to the clients"}
    return run_lines(run, names, format="bytes", zero=True)


def partition_map(partition: Partition) -> Spec:
    """Who holds which classes."""
    return {
        "kind": "heat",
        "classes": partition.classes,
        "names": partition.names,
        "shown": partition.client_names or partition.shown,
        "counts": partition.counts,
    }


EVENTS = {"dropped": 4, "rejected": 1, "repeated": 0, "skipped": 3, "not finite": 6}
"""What can go wrong in a round, with the color of its marks."""


def count_events(record: Mapping[str, Any]) -> dict[str, int]:
    """How often each of `EVENTS` happened in a round; what didn't happen is left out."""
    count = {
        "dropped": len(record.get("dropped") or ()),
        "rejected": len(record.get("rejected") or ()),
        "repeated": int(record.get("repeats") or 0),
        "skipped": int(bool(record.get("skipped"))),
        "not finite": int(any(key in record and record[key] is None for key in ("loss", "train_loss"))),
    }
    return {name: n for name, n in count.items() if n}


def event_marks(run: Run) -> Spec | None:
    """When clients were lost, updates rejected, rounds repeated or skipped."""
    seen = [(record["round"], count_events(record)) for record in run.rounds]
    rows = []
    for name, color in EVENTS.items():
        hits = [(round_num, count[name]) for round_num, count in seen if name in count]
        if hits:
            rows.append({"name": name, "x": [x for x, _ in hits], "n": [n for _, n in hits], "color": color})
    ends = [seen[0][0], seen[-1][0]] if seen else []
    return {"kind": "events", "ends": ends, "xlabel": "round", "rows": rows} if rows else None


def describe(title: str, spec: Spec) -> str:
    """The chart in a sentence, for those who don't see it."""
    better = f" {spec['better'].capitalize()} is better." if spec.get("better") else ""
    if spec["kind"] != "lines":
        return f"{title}.{better}"
    parts = []
    for line in spec["series"][:8]:
        values = [value for value in line["y"] if value is not None]
        if values:
            scale, unit = (100, " %") if spec.get("format") == "percent" else (1, "")
            first, last, low, high = (
                f"{scale * v:.4g}{unit}" for v in (values[0], values[-1], min(values), max(values))
            )
            parts.append(f"{line['name']} from {first} to {last}, lowest {low}, highest {high}")
    points = max((len(line["x"]) for line in spec["series"]), default=0)
    return f"{title}, line chart over {plural(points, 'point')}. {'; '.join(parts)}.{better}"


def _alternatives(group: Group, rounds: Sequence[int]) -> dict[str, list[float | None]]:
    found = {}
    for axis, keys in AXES.items():
        sums = [cumulative(run, keys) for run in group.distinct]
        if all(sums):
            joined = mean_curve(points for points in sums if points)
            at = dict(zip(joined.rounds, joined.mean, strict=True))
            found[axis] = [at.get(round_num) for round_num in rounds]
    return found

"""The paper's figures, drawn from the records of their cells; `report` has the charts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynafed.report import blocks, charts
from dynafed.report.clean import flatten
from dynafed.report.gallery import class_gallery
from dynafed.report.groups import mean_curve, mean_std
from dynafed.report.load import Run, load_run
from dynafed.report.page import Page
from dynafed.report.sections import grid
from dynafed.report.text import escape
from dynafed.reproduce.cells import PlannedCell
from dynafed.reproduce.paper import Experiment
from dynafed.reproduce.records import Record, variants

Draw = Callable[[Page, Experiment, Sequence[Record], Sequence[PlannedCell]], str]


def draw(page: Page, experiment: Experiment, records: Sequence[Record], planned: Sequence[PlannedCell]) -> str:
    """The HTML of a figure; of a table, its curves. Empty as long as nothing has run."""
    chosen: Draw = FIGURES.get(experiment.name, _curves)
    return chosen(page, experiment, [record for record in records if record.get("rounds")], planned)


def _curves(page: Page, experiment: Experiment, records: Sequence[Record], _: Any) -> str:
    """Accuracy over the rounds: a panel for each setting, a curve for each method, and FedAvg's mean."""
    panels = []
    for column in experiment.columns:
        here = [record for record in records if record["column"] == column.name]
        changed = variants(here)
        names = {one["digest"]: ", ".join(filter(None, (one["method"], changed[one["digest"]]))) for one in here}
        fedavg = [record for record in here if record["method"] == "fedavg"]
        series = _by(here, names, "curve")
        series |= _by(fedavg, {key: f"{name}, mean of the last 20" for key, name in names.items()}, "mean_curve")
        panels.append(_accuracy_chart(page, series, column.name))
    return grid(*panels)


def _trajectory_length(page: Page, experiment: Experiment, records: Sequence[Record], _: Any) -> str:
    """One panel: DynaFed for each length, the others once."""

    def name(record: Record) -> str:
        length = record["config"].get("dynafed", {}).get("trajectory")
        return f"{record['method']}, L = {length}" if length else str(record["method"])

    once = {record["digest"]: record for record in records}
    names = {digest: name(record) for digest, record in once.items()}
    return grid(_accuracy_chart(page, _by(once.values(), names, "curve"), experiment.title, wide=True))


def _samples(page: Page, experiment: Experiment, records: Sequence[Record], _: Any) -> str:
    """Final accuracy by the number of samples, a line for each alpha."""
    spec = _lines(
        records, lambda r: r["config"]["dynafed"]["samples"], lambda r: r.get("accuracy"), "synthetic samples"
    )
    return grid(page.chart(spec, "Final accuracy", better="higher", wide=True))


def _scratch(page: Page, experiment: Experiment, records: Sequence[Record], _: Any) -> str:
    """Accuracy of a network that saw nothing but D_syn, by local epochs, a line for each alpha."""
    found = [record for record in records if "evidence" in record]
    spec = _lines(
        found, lambda r: r["config"]["local_epochs"], lambda r: r["evidence"]["scratch_accuracy"], "local epochs"
    )
    return grid(page.chart(spec, "Accuracy after training on D_syn alone", better="higher", wide=True))


def _distance(page: Page, experiment: Experiment, records: Sequence[Record], _: Any) -> str:
    """Cosine distance to the target for each segment, the mean over seeds."""
    found = [record["evidence"]["cosine_by_segment"] for record in records if "evidence" in record]
    if not found:
        return ""
    series = {}
    for name in found[0]:
        joined = mean_curve([(int(start), value) for start, value in one[name].items()] for one in found)
        series[name] = (joined.rounds, joined.mean)
    spec = {"kind": "lines", "xlabel": "segment", "series": _series(series)}
    return grid(page.chart(spec, "Cosine distance", better="lower", wide=True))


def _losses(page: Page, experiment: Experiment, records: Sequence[Record], _: Any) -> str:
    """The losses of the watched clients of the first run that has them."""
    watched = next((record["watch"] for record in records if record.get("watch")), None)
    if watched is None:
        return ""
    rounds = tuple(
        flatten({"round": one["round"], "watch": {key: value for key, value in one.items() if key != "round"}})
        for one in watched
    )
    shown = charts.client_loss_lines(Run(Path(), {}, rounds))
    text = "In each round: through local training, where the client took part; of the average; of the refined model."
    panels = (page.chart(spec, f"Client {client}", better="lower", small=True) for client, spec in shown)
    return f'<p class="lead">{escape(text)}</p>{grid(*panels, style="small")}'


def _images(page: Page, experiment: Experiment, records: Sequence[Record], planned: Sequence[PlannedCell]) -> str:
    """The synthetic samples of the first run that has some."""
    for one in planned:
        if (one.cell.path / "synthetic.safetensors").is_file():
            return page.images(class_gallery(load_run(one.cell.path)))
    return ""


FIGURES: Mapping[str, Draw] = {
    "figure-losses": _losses,
    "figure-images": _images,
    "figure-trajectory-length": _trajectory_length,
    "figure-samples": _samples,
    "figure-distance": _distance,
    "figure-scratch": _scratch,
}
"""How each figure is drawn; whatever isn't here has curves."""


def figure_numbers(experiment: Experiment, records: Sequence[Record]) -> tuple[list[str], list[list[str]]] | None:
    """For figures whose numbers aren't final accuracies: the heads and rows of a table. None for the others."""
    found = [record for record in records if "evidence" in record]
    if experiment.name == "figure-scratch":
        rows = [[r["column"], str(r["seed"]), f"{100 * r['evidence']['scratch_accuracy']:.2f} %"] for r in found]
        return ["setting", "seed", "accuracy after training on D_syn alone"], rows
    if experiment.name == "figure-distance":
        rows = [
            [name, str(r["seed"]), f"{mean_std(list(values.values()))[0]:.4g}"]
            for r in found
            for name, values in r["evidence"]["cosine_by_segment"].items()
        ]
        return ["trained on", "seed", "cosine distance, mean over segments"], rows
    return None


def _accuracy_chart(page: Page, series: Mapping[str, Any], title: str, wide: bool = False) -> str:
    spec = {"kind": "lines", "xlabel": "round", "format": "percent", "series": _series(series)}
    return page.chart(spec if series else None, title, better="higher", wide=wide)


def _by(records: Iterable[Record], names: Mapping[str, str], key: str) -> dict[str, Any]:
    """(rounds, mean over seeds) of the curves with the same name, which they have by digest."""
    curves: dict[str, list[Any]] = {}
    for record in records:
        if record.get(key):
            curves.setdefault(names[record["digest"]], []).append(record[key])
    joined = {each: mean_curve(found) for each, found in curves.items()}
    return {each: (curve.rounds, curve.mean) for each, curve in joined.items()}


def _lines(
    records: Sequence[Record], x: Callable[[Record], int], y: Callable[[Record], float | None], xlabel: str
) -> charts.Spec | None:
    """A line for each alpha, the mean over seeds."""
    curves: dict[str, list[Any]] = {}
    for record in records:
        curves.setdefault(f"alpha {record['config']['alpha']:g}", []).append([(x(record), y(record))])
    joined = {name: mean_curve(points) for name, points in curves.items()}
    series = _series({name: (curve.rounds, curve.mean) for name, curve in joined.items()})
    return {"kind": "lines", "xlabel": xlabel, "format": "percent", "series": series} if series else None


def _series(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> list[charts.Spec]:
    return [{"name": name, "x": x, "y": y, "color": place} for place, (name, (x, y)) in enumerate(lines.items())]


def numbers_html(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`figure_numbers` for the page."""
    return blocks.table({"columns": list(heads), "rows": [list(row) for row in rows]})

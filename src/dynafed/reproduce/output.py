"""The files of a table or figure: NAME.jsonl, NAME.md and NAME.html, made anew from the runs whenever one is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dynafed.engine.files import write_bytes
from dynafed.report.page import CONTENTS, Page
from dynafed.report.text import duration, escape, plural
from dynafed.reproduce import paper
from dynafed.reproduce.cells import PlannedCell
from dynafed.reproduce.figures import draw, figure_numbers, numbers_html
from dynafed.reproduce.paper import Experiment
from dynafed.reproduce.records import Record, cell_record, earlier_records, write_records
from dynafed.reproduce.scales import SCALES, SERVER_SAMPLES, SYNTHESIS
from dynafed.reproduce.tables import Table, result_table


def write_outputs(
    experiment: Experiment,
    planned: Sequence[PlannedCell],
    out: Path,
    scale: str,
    stored: Mapping[str, Record] | None = None,
    command: str = "",
) -> list[Record]:
    """Write the three files, and return the cells' records; `stored` are results from elsewhere, by digest.

    The files keep the finished cells that other commands have left there.
    """
    planned_records = [cell_record(experiment.name, scale, one, stored or {}) for one in planned]
    file = out / f"{experiment.name}.jsonl"
    records = planned_records + earlier_records(file, scale, planned_records)
    table = result_table(experiment, records)
    write_records(file, records)
    write_bytes(out / f"{experiment.name}.md", _markdown(experiment, table, records, scale, command).encode())
    page = _page(experiment, table, records, planned, out, scale, command)
    write_bytes(out / f"{experiment.name}.html", page.encode())
    return planned_records


def _markdown(experiment: Experiment, table: Table, records: Sequence[Record], scale: str, command: str) -> str:
    numbers = figure_numbers(experiment, records)
    if numbers is None:
        body = table.markdown()
    else:
        heads, rows = numbers
        lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]
        body = "\n".join(lines)
    said = [f"# {experiment.name}: {experiment.title}", _summary(records, scale)]
    said += [f"```console\n$ {command}\n```"] if command else []
    return "\n\n".join([*said, body, *_notes(experiment, records)]) + "\n"


def _page(
    experiment: Experiment,
    table: Table,
    records: Sequence[Record],
    planned: Sequence[PlannedCell],
    out: Path,
    scale: str,
    command: str,
) -> str:
    page = Page(f"{experiment.name}: {experiment.title}", out)
    page.add(
        f'<header><p class="eyebrow">dynafed reproduce · {escape(experiment.name)}</p>'
        f"<h1>{escape(experiment.title)}</h1>"
        f'<p class="verdict">{escape(_summary(records, scale))}</p></header>',
        CONTENTS,
    )
    numbers = figure_numbers(experiment, records)
    page.section("Results", table.html() if numbers is None else numbers_html(*numbers))
    page.section(
        "Figure" if experiment.name.startswith("figure") else "Curves", draw(page, experiment, records, planned)
    )
    page.section("Notes", "".join(f"<p>{escape(note)}</p>" for note in _notes(experiment, records)))
    again = f'<p class="command"><span>Run it again</span><code>{escape(command)}</code></p>' if command else ""
    page.section("Made with", again)
    return page.html()


def _summary(records: Sequence[Record], scale: str) -> str:
    done = sum(bool(record.get("done")) for record in records)
    seconds = {record["digest"]: record["seconds"] for record in records if "seconds" in record}
    took = f", in {duration(sum(seconds.values()))} of run time" if seconds else ""
    return f"Scale {scale}: {SCALES[scale]}. {done} of {plural(len(records), 'cell')} done{took}."


def _notes(experiment: Experiment, records: Sequence[Record]) -> list[str]:
    """What a reader should know, in sentences."""
    unit = "rounds to the target" if experiment.counts_rounds else "percent"
    notes = [
        f"Numbers are {unit}. Accuracy is the mean test accuracy of the last five rounds, as in the paper; ± is the "
        "deviation over seeds. “Mean of the last 20” is the accuracy of the mean of the last 20 global models, "
        "evaluated in the same run: it costs nothing, and the paper doesn't have it. A letter in the last column says "
        "how a cell differs from the paper's text.",
        f"The paper's numbers are from {experiment.label}, line {experiment.line} of its source. {paper.source()}.",
    ]
    notes += [f"The paper, line {line}: {text}" for line, text in experiment.claims]
    notes += experiment.notes
    if any(record["method"] == "dynafed" for record in records):
        notes.append(SYNTHESIS)
    if any(record["config"].get("server_samples") for record in records):
        notes.append(
            f"FedDF, FedBE and ABAVG look at {SERVER_SAMPLES} samples that are carved from the training split for them "
            "alone; the paper doesn't say how many it takes, nor the settings of the baselines. FedDF and FedBE have "
            "those of docs/methods.md."
        )
    missing = dict.fromkeys(record["reason"] for record in records if "reason" in record)
    return [*notes, *(f"Cells without data are left open: {reason}." for reason in missing)]

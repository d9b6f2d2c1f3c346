"""Who is well served: a table of the clients, and which class is taken for which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynafed.report.blocks import sortable_table
from dynafed.report.load import Run
from dynafed.report.measures import measure
from dynafed.report.text import escape, number

MOST = 100
"""Clients in the table: of more, those that are served worst."""


def served_tables(run: Run, class_names: Sequence[str]) -> str:
    """The tables of a run whose clients hold samples out; nothing for others."""
    return _client_table(run) + _confusion_table(run.last("confusion"), class_names)


def _client_table(run: Run) -> str:
    metric = run.metric
    values, losses = run.last(f"{metric}_per_client"), run.last("loss_per_client") or {}
    if not values:
        return ""
    worst = sorted(values, key=lambda name: values[name] or 0, reverse=run.lower_is_better)[:MOST]
    rows: list[list[tuple[str, Any]]] = [
        [
            (escape(name), name),
            (measure(metric).show(values[name]), values[name]),
            (number(losses.get(name)), losses.get(name)),
        ]
        for name in worst
    ]
    tenth = run.last(f"{metric}_worst_tenth")
    lead = f"The worst tenth of {len(values)} clients: {measure(metric).show(tenth)}, on what they held out"
    table = sortable_table(
        [("client", False), (escape(measure(metric).name), True), ("loss", True)], rows, label="clients"
    )
    return f'<h3>Clients, worst first</h3><p class="lead">{lead}.</p>{table}'


def _confusion_table(confusion: Any, names: Sequence[str]) -> str:
    if not isinstance(confusion, list):
        return ""
    named = [str(name) for name in names] if len(names) == len(confusion) else [str(n) for n in range(len(confusion))]
    columns = [("class", False), *((escape(name), True) for name in named)]
    rows: list[list[tuple[str, Any]]] = [
        [(escape(name), name), *((number(count), count) for count in counts)]
        for name, counts in zip(named, confusion, strict=True)
    ]
    lead = "A row for each class: how many of the server’s test samples of it are taken for which class."
    table = sortable_table(columns, rows, style="tight", label="confusion matrix")
    return f'<h3>Which class is taken for which</h3><p class="lead">{lead}</p>{table}'

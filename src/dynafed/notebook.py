"""What a notebook shows: a progress bar, a result's curve and numbers, a comparison's."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from dynafed.progress import Progress, clock, format_metric
from dynafed.terminal import View

if TYPE_CHECKING:
    from dynafed.engine.compare import Comparison
    from dynafed.engine.result import Result

WIDTH, HEIGHT = 480, 160
SHARES = ("accuracy", "f1")
COLORS = ("#2a6fdb", "#d9622b", "#2a9d68", "#9a4fd0", "#b8860b", "#c2346d", "#4a4a4a", "#17a2b8")


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython.get_ipython() if ipython else None, "kernel", None) is not None


class NotebookView(View):
    """A bar in the output of the cell that runs; the last line stays."""

    period = 0.5

    def __init__(self) -> None:
        self.handle: Any = None
        self.said: list[str] = []
        self.shown = ""

    def draw(self, progress: Progress) -> None:
        """Update the bar."""
        run = progress.run
        done, total = (run.round, run.rounds) if run.rounds else (run.stage.done, run.stage.total)
        value = f' value="{done}" max="{total}"' if total else ""
        self._show(f'<progress{value} style="width:20em"></progress> {escape(str(progress))}')

    def close(self) -> None:
        """Leave the lines."""
        self._show("")

    def say(self, line: str) -> None:
        """Keep a line above the bar."""
        self.said.append(escape(line))

    def _show(self, last: str) -> None:
        from IPython.display import HTML, display

        page = "<br>".join([*self.said, last] if last else self.said)
        if page == self.shown:
            return
        self.shown = page
        if self.handle is None:
            self.handle = display(HTML(page), display_id=True)
        else:
            self.handle.update(HTML(page))


def result_html(result: Result) -> str:
    """A run's accuracy over the rounds, and its numbers."""
    summary = result.summary
    metric = summary.get("metric", "accuracy")
    show = partial(format_metric, metric)
    points = [(record["round"], record[metric]) for record in result.history if metric in record]
    numbers = {
        f"final {metric}": f"{show(summary[f'final_{metric}'])} ± {show(summary['final_std'])}",
        "best": f"{show(summary['best'])} in round {summary['best_round']}",
        "rounds": summary["rounds"],
        "time": clock(summary["seconds"]),
        "files": result.path,
    }
    title = f"{summary['method']} on {summary['dataset']}"
    return f"<b>{escape(title)}</b>{_curves({title: points}, metric)}{_table([numbers])}"


def comparison_html(comparison: Comparison) -> str:
    """The mean accuracy of each method over the rounds, and the table."""
    metric = comparison.metric
    show = partial(format_metric, metric)
    rows = [
        {key: value for key, value in row.items() if key in comparison.settings}
        | ({"attack": row.get("attack", "")} if comparison.attacked else {})
        | {
            "seeds": len(row["seeds"]),
            f"final {metric}": show(row[f"final_{metric}"]) + (f" ± {show(row['std'])}" if row["std"] else ""),
            "best": show(row["best"]),
            "time": clock(row["seconds"]),
        }
        for row in comparison.rows
    ]
    return f"{_curves(comparison.curves(), metric)}{_table(rows)}<small>{escape(str(comparison.path))}</small>"


def _curves(curves: Mapping[str, Sequence[tuple[int, float]]], metric: str) -> str:
    """Lines of a metric by round, as SVG; nothing if none has two points."""
    rounds = max((number for points in curves.values() for number, _ in points), default=0)
    if rounds < 2:
        return ""
    # A share goes to 1, anything else to its largest value.
    top = max(1.0 if metric in SHARES else 0.0, *(value for points in curves.values() for _, value in points)) or 1.0
    lines = []
    for color, (name, points) in zip(COLORS * (1 + len(curves) // len(COLORS)), curves.items(), strict=False):
        drawn = " ".join(f"{WIDTH * number / rounds:.1f},{HEIGHT * (1 - value / top):.1f}" for number, value in points)
        lines.append(
            f'<polyline points="{drawn}" fill="none" stroke="{color}" stroke-width="1.5"><title>{escape(name)}</title>'
            f"</polyline>"
        )
    grid = "".join(
        f'<line x1="0" x2="{WIDTH}" y1="{HEIGHT * (1 - share)}" y2="{HEIGHT * (1 - share)}" stroke="#8884"/>'
        f'<text x="{WIDTH + 4}" y="{HEIGHT * (1 - share) + 4}" font-size="11" fill="currentColor">'
        f"{format_metric(metric, share * top)}</text>"
        for share in (0, 0.25, 0.5, 0.75, 1)
    )
    legend = " ".join(
        f'<span style="color:{color}">&#9644;</span> {escape(name)}'
        for color, name in zip(COLORS * (1 + len(curves) // len(COLORS)), curves, strict=False)
    )
    return (
        f'<svg width="{WIDTH + 60}" height="{HEIGHT + 16}" viewBox="0 -8 {WIDTH + 60} {HEIGHT + 16}" role="img" '
        f'aria-label="{escape(metric)} over {rounds} rounds" style="display:block">{grid}{"".join(lines)}</svg>'
        + (f"<div>{legend}</div>" if len(curves) > 1 else "")
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(str(key))}</th>" for key in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in row.values())}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

"""What the grids of experiments share: cells that are run once, and a JSON list with a row for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dynafed.engine.grid import Cell, run_cells

Row = dict[str, Any]

L2: dict[str, Any] = {"dynafed.distance": "l2", "dynafed.inner_rates": "single", "dynafed.inner_lr_rate": 0.01}
"""The synthesis of the demo as it was when the experiments behind docs/trust.md were run."""


def run_rows(cells: Iterable[tuple[Row, Cell]], measured: Callable[[Path], Row], out: Path) -> None:
    """Run the cells that have no row in `out`; print and write every row as soon as it is there.

    Each cell comes with what tells its row from the others; `measured` adds what its run folder says.
    """
    rows = json.loads(out.read_text()) if out.exists() else []
    planned = {cell.path: (row, cell) for row, cell in cells if not any(row.items() <= done.items() for done in rows)}
    out.parent.mkdir(parents=True, exist_ok=True)
    for done, _ in run_cells([cell for _, cell in planned.values()]):
        rows.append(planned[done.path][0] | measured(done.path))
        print(json.dumps(rows[-1]), flush=True)
        out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")

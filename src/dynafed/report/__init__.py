"""The report page: one self-contained `report.html` from one or several run folders.

A module with more to show writes a `report.json` into its run folder; `dynafed.report.blocks` says what may be in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dynafed.engine.files import write_bytes
from dynafed.errors import UserError
from dynafed.report.comparison import compare_page
from dynafed.report.load import find_runs, load_run
from dynafed.report.single import run_page

__all__ = ["write_report"]


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of one run, or the comparison of several, and return where it is.

    A path may be a run folder or a folder with runs in it, up to three levels down. `out` is a file, or a folder for
    `report.html`; left out, the page goes into the one folder given, or for several into the working directory.
    """
    runs = [load_run(path) for path in find_runs(paths)]
    out, named = (Path(paths[0]) if len(paths) == 1 else Path(), False) if out is None else (Path(out), True)
    if out.is_dir():
        out, named = out / "report.html", False
    text = run_page(runs[0], out.parent) if len(runs) == 1 else compare_page(runs, out.parent)
    try:
        if named:  # it may be a device, such as /dev/stdout
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, "utf-8")
        else:
            write_bytes(out, text.encode())
    except OSError as error:
        raise UserError(f"can't write {out}: {error.strerror}") from None
    return out

"""What a notebook shows: a progress bar."""

from __future__ import annotations

import sys
from html import escape
from typing import Any

from dynafed.progress import Progress
from dynafed.terminal import View


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

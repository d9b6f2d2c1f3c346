"""Logs to TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynafed.callbacks import RunContext
from dynafed.loggers.base import Rows, RunLogger

if TYPE_CHECKING:
    from PIL.Image import Image


class TensorBoard(RunLogger):
    """Writes event files into the run's folder, or into `folder`; look at them with `tensorboard --logdir runs`.

    The page HPARAMS compares the finished runs.
    """

    name = "tensorboard"

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self.folder = folder

    def open(self, run: RunContext, config: Mapping[str, Any], before: str | None) -> str:
        """Open the event file. After a resume, rounds that are run again replace those of before."""
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self.folder or run.path / self.name)
        self.writer: Any = SummaryWriter(str(folder), purge_step=run.round + 1)
        self.log_table("config", ("key", "value"), [[key, f"`{value}`"] for key, value in config.items()])
        return str(folder.resolve()) if self.folder else self.name  # the run's folder may move

    def log_numbers(self, values: Mapping[str, float], round_num: int) -> None:
        """Add a round to curves."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, round_num)

    def log_curve(self, name: str, points: Mapping[int, float]) -> None:
        """Add a curve."""
        for step, value in points.items():
            self.writer.add_scalar(name, value, step)

    def log_image(self, name: str, image: Image, step: int) -> None:
        """Add a picture."""
        import numpy as np

        self.writer.add_image(name, np.asarray(image), step, dataformats="HWC")

    def log_table(self, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Add a table as Markdown."""
        lines = [columns, ["---"] * len(columns), *rows]
        self.writer.add_text(name, "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines))

    def log_summary(self, summary: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Add the run to the page HPARAMS. `SummaryWriter.add_hparams` would make a second run for that."""
        from torch.utils.tensorboard import summary as events

        shown = {key: value if isinstance(value, int | float) else str(value) for key, value in config.items()}
        make: Any = events.hparams
        for part in make(shown, dict(summary)):
            self.writer.file_writer.add_summary(part)
        self.log_numbers(summary, 0)

    def close(self, failed: bool) -> None:
        """Close the event file."""
        self.writer.close()

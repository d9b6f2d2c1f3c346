"""Logs to Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynafed.callbacks import RunContext
from dynafed.errors import UserError, first_line
from dynafed.loggers.base import Rows, RunLogger, run_name

if TYPE_CHECKING:
    from PIL.Image import Image


class WandB(RunLogger):
    """Sends the run to Weights & Biases. `options` are those of `wandb.init`, such as `mode="offline"`.

    The variables of wandb decide what isn't given: WANDB_PROJECT (else "dynafed"), WANDB_MODE, WANDB_API_KEY, ...
    """

    name = "wandb"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        import wandb

        if (options.get("mode") or os.environ.get("WANDB_MODE") or "online") in ("online", "shared"):
            try:
                wandb.login()
            except wandb.errors.UsageError as error:
                raise UserError(f"wandb: {first_line(error)} Or set WANDB_MODE=offline") from None

    def open(self, run: RunContext, config: Mapping[str, Any], before: str | None) -> str:
        """Begin a run of wandb, or go on with it."""
        import wandb

        found = {
            "project": os.environ.get("WANDB_PROJECT") or "dynafed",
            "name": run_name(run.path),
            "dir": str(run.path.resolve()),
            "config": dict(config),
            "settings": wandb.Settings(console="off"),
        }
        resumed = {"id": before, "resume": "allow"} if before else {}
        try:
            self.log = wandb.init(**{**found, **resumed, **self.options})
        except wandb.errors.Error as error:
            raise UserError(f"wandb: {first_line(error)}") from None
        # Curves have an axis of their own: wandb's step can't go back, and a resumed run does some rounds again.
        for axis, names in (("round", "*"), ("iteration", "synthesis/*")):
            self.log.define_metric(axis, hidden=True)
            self.log.define_metric(names, step_metric=axis)
        return str(self.log.id)

    def log_numbers(self, values: Mapping[str, float], round_num: int) -> None:
        """Add a round to curves."""
        self.log.log({**values, "round": round_num})

    def log_curve(self, name: str, points: Mapping[int, float]) -> None:
        """Add a curve."""
        for step, value in points.items():
            self.log.log({name: value, "iteration": step})

    def log_image(self, name: str, image: Image, step: int) -> None:
        """Add a picture."""
        import wandb

        self.log.log({name: wandb.Image(image), "iteration": step})

    def log_table(self, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Add a table."""
        import wandb

        self.log.log({f"{name}_table": wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def log_summary(self, summary: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Put the numbers into wandb's table of runs."""
        self.log.summary.update(dict(summary))

    def close(self, failed: bool) -> None:
        """End the run of wandb."""
        self.log.finish(exit_code=int(failed))

"""What a finished run leaves in Python."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from dynafed.callbacks import Record
from dynafed.engine.checkpoint import RunState
from dynafed.engine.federation import Federation
from dynafed.errors import UserError
from dynafed.predictor import Predictor


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run."""

    path: Path
    federation: Federation
    state: RunState
    history: list[Record]
    """One record a round, as in metrics.jsonl."""
    summary: dict[str, Any]

    def __repr__(self) -> str:
        metric = self.federation.problem.task.metric
        final, deviation = self.summary[f"final_{metric}"], self.summary["final_std"]
        scale, unit = (100, " %") if metric == "accuracy" else (1, "")
        return (
            f"Result({self.summary['method']} on {self.summary['dataset']}, {self.summary['rounds']} rounds: "
            f"{metric} {scale * final:.2f} ± {scale * deviation:.2f}{unit}, in {str(self.path)!r})"
        )

    def _repr_html_(self) -> str:
        from dynafed.notebook import result_html

        return result_html(self)

    @property
    def final_accuracy(self) -> float:
        """The mean accuracy of the last five rounds that were evaluated."""
        if "final_accuracy" not in self.summary:
            raise UserError(f"with loss = '{self.federation.config.loss}' there is no accuracy: look at result.summary")
        return float(self.summary["final_accuracy"])

    @cached_property
    def model(self) -> nn.Module:
        """The trained global model, in evaluation mode. It takes normalized samples; `predict` takes raw ones."""
        module = self.federation.problem.model
        module.load_state_dict(self.state.final_model, strict=False)
        return module.eval()

    @cached_property
    def predictor(self) -> Predictor:
        """The model with the normalization of its inputs and the labels of its classes."""
        return Predictor(self.model, self.federation.schema, self.federation.problem.task)

    def predict(self, x: Any) -> np.ndarray:
        """What the trained model takes raw samples for: labels as they were given, or numbers."""
        return self.predictor.predict(x)

    def evaluate(self, x: Any, y: Any) -> dict[str, float]:
        """The trained model's metrics on raw samples with their labels."""
        return self.predictor.evaluate(x, y)

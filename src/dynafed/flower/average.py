"""A running mean of the global models, around any strategy of Flower's Message API."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from dynafed.flower.records import from_record, to_record
from dynafed.flower.reply_guard import NoModel
from dynafed.flower.wrapper import Wrapper
from dynafed.messages import validate_finite
from dynafed.methods.average import AverageSettings, RunningMean
from dynafed.settings import build
from dynafed.tree import Tree

log = logging.getLogger("flwr")


class Average(Wrapper):
    """Evaluates and returns a running mean of the global models; the clients go on from the model itself.

    `config` holds settings of section `average`. Comes outside all other wrappers, `DynaFed` too, whose `folder` it
    uses if it isn't given one.
    """

    section = "average"

    def __init__(
        self,
        strategy: Strategy,
        *,
        config: AverageSettings | Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
        large_updates: str = "reject",
    ) -> None:
        inner = strategy.folder if isinstance(strategy, Wrapper) else None
        super().__init__(strategy, folder if folder is not None else inner, large_updates)
        self.settings = (
            config if isinstance(config, AverageSettings) else build(AverageSettings, config or {}, "average.")
        )
        self.running = RunningMean(self.settings)
        self.state: Tree = {}
        self.mean: ArrayRecord | None = None
        """Of the models so far; None before the first."""

    def initialize(self, arrays: ArrayRecord) -> None:
        """Forget the models of another run."""
        self.state, self.mean = {}, None

    def load(self, state: Tree, arrays: ArrayRecord) -> None:
        """Put a saved state back, and the mean with it."""
        super().load(state, arrays)
        if state:
            self.mean = to_record(self.running.mean(state, from_record(arrays)))

    def process(self, round_num: int, aggregate: ArrayRecord | None) -> ArrayRecord | None:
        """The aggregate as it is, or the mean if that is what clients get."""
        if not aggregate:
            return None
        model = from_record(aggregate)
        if problem := validate_finite(model):
            raise NoModel(f"the aggregate of round {round_num} is no model: {problem}")
        self.state = self.running.add(self.state, model, round_num)
        self.mean = to_record(self.running.mean(self.state, model))
        return self.mean if self.settings.clients_get == "mean" else aggregate

    def served(self, arrays: ArrayRecord) -> ArrayRecord:
        """The mean."""
        return self.mean or arrays

    def summary(self) -> None:
        """Log which mean it is, then the wrapped strategy's summary."""
        chosen = self.settings
        kinds = {"last": f"the last {chosen.window}", "exponential": f"decay {chosen.decay:g}"}
        log.info("\t├──> Average settings:")
        log.info("\t│\t└── Mean of the models: %s", kinds.get(chosen.kind, f"all since round {chosen.since}"))
        self.strategy.summary()

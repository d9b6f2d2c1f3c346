"""DynaFed around any strategy of Flower's Message API."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy

from dynafed.flower.refiner import Refiner
from dynafed.flower.wrapper import Wrapper
from dynafed.models import Factory
from dynafed.synthesis import DynaFedSettings
from dynafed.tree import Tree

log = logging.getLogger("flwr")


class DynaFed(Wrapper):
    """Refines what another strategy aggregates; everything else is that strategy's own.

    Rounds 1 to L are recorded, D_syn is made once, every later aggregate is fine-tuned on it (see `Refiner` for the
    arguments). With a `folder`, `start` saves every round there and, called again by a server app that was started
    anew, goes on after the last one.
    """

    section = "dynafed"

    def __init__(
        self,
        strategy: Strategy,
        *,
        model: Factory,
        shape: Sequence[int],
        classes: int,
        config: DynaFedSettings | Mapping[str, Any] | None = None,
        seed: int = 0,
        folder: str | Path | None = None,
        large_updates: str = "reject",
    ) -> None:
        super().__init__(strategy, folder, large_updates)
        self.seed = seed
        self.refiner = Refiner(model=model, shape=shape, classes=classes, config=config, seed=seed, folder=folder)
        self.settings = self.refiner.settings

    @property
    def state(self) -> Tree:
        """The trajectory, and D_syn once there is one."""
        return self.refiner.state

    @state.setter
    def state(self, state: Tree) -> None:
        self.refiner.state = state

    def initialize(self, arrays: ArrayRecord) -> None:
        """The initial model may be part of the trajectory."""
        self.refiner.initialize(arrays)

    def process(self, round_num: int, aggregate: ArrayRecord | None) -> ArrayRecord | None:
        """The aggregate, recorded or fine-tuned."""
        return self.refiner.refine(round_num, aggregate)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """What the wrapped strategy aggregates, refined; None, so that the model stays, if that isn't a sound model."""
        self.refiner.metrics = {}
        arrays, metrics = super().aggregate_train(server_round, replies)
        own = {f"dynafed_{name}": value for name, value in self.refiner.metrics.items()}
        return arrays, MetricRecord({**own, **(metrics or {})}) if own else metrics

    def summary(self) -> None:
        """Log what will be done when, then the wrapped strategy's summary."""
        chosen = self.refiner.settings
        log.info("\t├──> DynaFed settings:")
        log.info("\t│\t├── Recorded rounds: %d", chosen.trajectory)
        log.info("\t│\t├── Synthesis: %d samples in %d iterations", chosen.samples, chosen.iterations)
        log.info("\t│\t└── Fine-tuning: %d steps in each later round", chosen.finetune_steps)
        self.strategy.summary()

    def check_rounds(self, num_rounds: int) -> None:
        """Warn if the rounds end before anything is refined."""
        if num_rounds <= self.settings.trajectory:
            log.warning("DynaFed: num_rounds = %d leaves none after dynafed.trajectory to refine in", num_rounds)

    def identity(self) -> dict[str, Any]:
        """The settings and the seed."""
        return {"seed": self.seed} | super().identity()

"""DynaFed around any strategy of Flower's Message API."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from safetensors import SafetensorError

from dynafed import settings, tree
from dynafed.engine.files import lock_folder, write_bytes
from dynafed.errors import UserError
from dynafed.flower.records import from_record, to_record
from dynafed.flower.refiner import NotFinite, Refiner
from dynafed.flower.strategy_state import StrategyState, decode_order, encode_order
from dynafed.models import Factory
from dynafed.synthesis import DynaFedSettings

log = logging.getLogger("flwr")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class DynaFed(Strategy):
    """Refines what another strategy aggregates; everything else is that strategy's own.

    Rounds 1 to L are recorded, D_syn is made once, every later aggregate is fine-tuned on it (see `Refiner` for the
    arguments). With a `folder`, `start` saves every round there and, called again by a server app that was started
    anew, goes on after the last one.
    """

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
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise UserError(
                f"DynaFed goes around a strategy from flwr.serverapp.strategy, such as FedAvg(), not {strategy!r}"
            )
        self.strategy = strategy
        self.seed = seed
        self.refiner = Refiner(model=model, shape=shape, classes=classes, config=config, seed=seed, folder=folder)
        self.strategy_state = StrategyState(strategy)
        self.rounds_done = 0
        """Rounds that were done before this `start`, which counts from 1."""
        self.sent_arrays: ArrayRecord | None = None
        """The model that the clients got last."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy does, which is told what the clients really get."""
        if self.sent_arrays is None:
            self.refiner.initialize(arrays)
        self.sent_arrays = arrays
        self.strategy_state.set_current_arrays(arrays)
        return self.strategy.configure_train(self.rounds_done + server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """What the wrapped strategy aggregates, refined; None, so that the model stays, if that isn't a sound model."""
        round_num, snapshot = self.rounds_done + server_round, self.strategy_state.snapshot()
        aggregate, metrics = self.strategy.aggregate_train(round_num, replies)
        try:
            arrays = self.refiner.refine(round_num, aggregate)
            if arrays is None:
                log.warning("DynaFed: round %d has no aggregate, so the global model stays as it was", round_num)
        except NotFinite as error:
            arrays = None
            self.strategy_state.rollback(snapshot)
            log.warning("DynaFed: %s; the global model stays as it was", error)
        self._save(round_num, arrays or self.sent_arrays)
        return arrays, self._add_metrics(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy does."""
        return self.strategy.configure_evaluate(self.rounds_done + server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy does."""
        return self.strategy.aggregate_evaluate(self.rounds_done + server_round, replies)

    def summary(self) -> None:
        """Log what will be done when, then the wrapped strategy's summary."""
        chosen = self.refiner.settings
        log.info("\t├──> DynaFed settings:")
        log.info("\t│\t├── Recorded rounds: %d", chosen.trajectory)
        log.info("\t│\t├── Synthesis: %d samples in %d iterations", chosen.samples, chosen.iterations)
        log.info("\t│\t└── Fine-tuning: %d steps in each later round", chosen.finetune_steps)
        self.strategy.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run rounds 1 to `num_rounds`, or those of them that the checkpoint in the folder leaves to do.

        After a resume, the result's metrics are those of the rounds since.
        """
        if num_rounds <= self.refiner.settings.trajectory:
            log.warning("DynaFed: num_rounds = %d leaves none after dynafed.trajectory to refine in", num_rounds)
        with lock_folder(self.refiner.folder) if self.refiner.folder else nullcontext():
            arrays = self._restore(initial_arrays)
            done = self.rounds_done

            def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
                return evaluate_fn(done + server_round, arrays) if evaluate_fn else None

            result = super().start(
                grid,
                arrays,
                max(0, num_rounds - done),
                timeout,
                train_config,
                evaluate_config,
                evaluate if evaluate_fn else None,
            )
        result.arrays = result.arrays or arrays
        for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            setattr(result, name, {done + round_num: metrics for round_num, metrics in getattr(result, name).items()})
        return result

    def _add_metrics(self, metrics: MetricRecord | None) -> MetricRecord | None:
        own = {f"dynafed_{name}": value for name, value in self.refiner.metrics.items()}
        return MetricRecord({**own, **(metrics or {})}) if own else metrics

    @property
    def _file(self) -> Path | None:
        return self.refiner.folder and self.refiner.folder / "flower.safetensors"

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {"seed": self.seed} | {f"dynafed.{k}": v for k, v in settings.plain(self.refiner.settings).items()}

    def _save(self, round_num: int, arrays: ArrayRecord | None) -> None:
        if self._file is None or arrays is None:
            return
        tensors, notes = self.strategy_state.save()
        text = json.dumps({"round": round_num, "identity": self._identity(), "strategies": notes})
        parts = {
            "arrays": encode_order(from_record(arrays)),
            "dynafed": self.refiner.state,
            "strategies": tensors,
            "notes": {"json": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)},
        }
        write_bytes(self._file, tree.pack(tree.nest(parts)))

    def _restore(self, initial_arrays: ArrayRecord) -> ArrayRecord:
        """The arrays to begin with: the initial ones, or those of a checkpoint, with which all the rest comes back."""
        self.rounds_done, self.sent_arrays = 0, initial_arrays
        self.refiner.initialize(initial_arrays)
        if self._file is None or not self._file.exists():
            return initial_arrays
        try:
            parts = tree.unnest(tree.unpack(self._file.read_bytes()))
            notes = json.loads(bytes(parts["notes"]["json"].numpy()))
            arrays = to_record(decode_order(parts["arrays"]))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{self._file} is no checkpoint ({error}): delete it to start anew") from None
        for name, value in self._identity().items():
            if (before := notes["identity"].get(name)) != value:
                raise UserError(
                    f"{self._file} was made with {name} = {before!r}, not {value!r}: give that, or another folder"
                )
        self.refiner.initialize(arrays)
        self.strategy_state.load(parts.get("strategies", {}), notes["strategies"])
        self.refiner.state = parts.get("dynafed", {})
        self.rounds_done, self.sent_arrays = notes["round"], arrays
        log.info("DynaFed: going on after round %d; Flower counts the rounds that are left from 1", self.rounds_done)
        return arrays

"""What strategies that go around another strategy have in common: they pass everything on, and save every round."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from safetensors import SafetensorError

from dynafed import settings, tree
from dynafed.engine.files import lock_folder, make_folder, write_bytes
from dynafed.errors import UserError
from dynafed.flower.records import from_record, to_record
from dynafed.flower.reply_guard import NoModel, ReplyGuard
from dynafed.flower.strategy_state import StrategyState, decode_order, encode_order
from dynafed.tree import Tree

log = logging.getLogger("flwr")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Wrapper(Strategy):
    """Changes what another strategy aggregates; everything else is that strategy's own.

    With a `folder`, `start` of the outermost wrapper saves every round there and, called again by a server app that was
    started anew, goes on after the last one. A subclass has a `section` of settings, a `state`, and `process`.

    The outermost wrapper leaves out replies with NaN, infinity or a change far larger than those of the rounds before,
    unless its `large_updates` is "accept". What is aggregated or made of it and is no sound model is taken back.
    """

    section: ClassVar[str]
    """The name of its settings and, in a checkpoint, of its state."""
    settings: Any
    state: Tree
    """All that changes, but for what the wrapped strategies keep."""
    outermost = True
    """Whether no other wrapper goes around it."""

    def __init__(self, strategy: Strategy, folder: str | Path | None, large_updates: str) -> None:
        name = type(self).__name__
        if large_updates not in ("reject", "accept"):
            raise UserError(f"large_updates = {large_updates!r} is not one of reject, accept")
        if not isinstance(strategy, Strategy):
            raise UserError(
                f"{name} goes around a strategy from flwr.serverapp.strategy, such as FedAvg(), not {strategy!r}"
            )
        self.strategy = strategy
        self.strategy_state = StrategyState(strategy)
        inner = [one for one in self.strategy_state.strategies if isinstance(one, Wrapper)]
        for one in inner:
            if one.section in ("average", self.section):
                raise UserError(f"{name} can't go around {type(one).__name__}: put Average outside, and each one once")
            one.outermost = False
        self.wrappers: list[Wrapper] = [self, *inner]
        self.folder = None if folder is None else make_folder(Path(folder))
        self.rounds_done = 0
        """Rounds that were done before this `start`, which counts from 1."""
        self.sent_arrays: ArrayRecord | None = None
        """The model that the clients got last."""
        self.large_updates = large_updates
        self.norms: Tree = {}
        """How large the replies of the last rounds were."""
        self.guard = ReplyGuard(None, {}, large_updates)
        """Of this round; all wrappers have that of the outermost."""

    def process(self, round_num: int, aggregate: ArrayRecord | None) -> ArrayRecord | None:
        """What the clients get in place of a round's aggregate; raises `NoModel` for one that is no model."""
        raise NotImplementedError

    def initialize(self, arrays: ArrayRecord) -> None:
        """Take the model that the first round begins with."""

    def load(self, state: Tree, arrays: ArrayRecord) -> None:
        """Put a saved state back; `arrays` are the model that the clients get next."""
        self.initialize(arrays)
        self.state, self.sent_arrays = state, arrays

    def served(self, arrays: ArrayRecord) -> ArrayRecord:
        """What is evaluated and returned in place of the model that the clients train."""
        return arrays

    def check_rounds(self, num_rounds: int) -> None:
        """Warn if these rounds make no sense."""

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {f"{self.section}.{name}": value for name, value in settings.plain(self.settings).items()}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy does, which is told what the clients really get."""
        if self.sent_arrays is None:
            self.initialize(arrays)
        self.sent_arrays = arrays
        self.strategy_state.set_current_arrays(arrays)
        return self.strategy.configure_train(self.rounds_done + server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """What the wrapped strategy aggregates, changed; None, so that the model stays, if that isn't a sound model."""
        name, round_num, snapshot = type(self).__name__, self.rounds_done + server_round, self.strategy_state.snapshot()
        state, aggregate, arrays, metrics = self.state, None, None, None
        try:
            if replies := self._sound(replies):
                aggregate, metrics = self.strategy.aggregate_train(round_num, replies)
            self.guard.check(aggregate, f"the aggregate of round {round_num}")
            arrays = self.process(round_num, aggregate)
            self.guard.check(arrays, f"what {name} made of round {round_num}")
            if arrays is None:
                log.warning("%s: round %d has no aggregate, so the global model stays as it was", name, round_num)
        except NoModel as error:
            arrays, self.state = None, state
            self.strategy_state.rollback(snapshot)
            log.warning("%s: %s; the global model stays as it was", name, error)
        self._save(round_num, arrays or self.sent_arrays)
        return arrays, metrics

    def _sound(self, replies: Iterable[Message]) -> list[Message]:
        """The replies that may count; an inner wrapper gets only such."""
        if not self.outermost:
            return list(replies)
        guard = ReplyGuard(self.sent_arrays, self.norms, self.large_updates)
        for one in self.wrappers:
            one.guard = guard
        try:
            return guard.sound(replies)
        finally:
            self.norms = guard.norms

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy does."""
        return self.strategy.configure_evaluate(self.rounds_done + server_round, self.served(arrays), config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy does."""
        return self.strategy.aggregate_evaluate(self.rounds_done + server_round, replies)

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
        for one in self.wrappers:
            one.check_rounds(num_rounds)
        with lock_folder(self.folder) if self.folder else nullcontext():
            arrays = self._restore(initial_arrays)
            done = self.rounds_done

            def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
                return evaluate_fn(done + server_round, self.served(arrays)) if evaluate_fn else None

            result = super().start(
                grid,
                arrays,
                max(0, num_rounds - done),
                timeout,
                train_config,
                evaluate_config,
                evaluate if evaluate_fn else None,
            )
        result.arrays = self.served(result.arrays or arrays)
        for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            setattr(result, name, {done + round_num: metrics for round_num, metrics in getattr(result, name).items()})
        return result

    @property
    def _file(self) -> Path | None:
        return self.folder and self.folder / "flower.safetensors"

    def _identities(self) -> dict[str, Any]:
        return {name: value for one in self.wrappers for name, value in one.identity().items()}

    def _save(self, round_num: int, arrays: ArrayRecord | None) -> None:
        if self._file is None or arrays is None or not self.outermost:
            return
        tensors, notes = self.strategy_state.save()
        text = json.dumps({"round": round_num, "identity": self._identities(), "strategies": notes})
        parts = {
            "arrays": encode_order(from_record(arrays)),
            "strategies": tensors,
            "norms": self.norms,
            "notes": {"json": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)},
        }
        write_bytes(self._file, tree.seal(tree.nest(parts | {one.section: one.state for one in self.wrappers}), {}))

    def _restore(self, initial_arrays: ArrayRecord) -> ArrayRecord:
        """The arrays to begin with: the initial ones, or those of a checkpoint, with which all the rest comes back."""
        self.rounds_done, self.sent_arrays, self.norms = 0, initial_arrays, {}
        for one in self.wrappers:
            one.initialize(initial_arrays)
        if self._file is None or not self._file.exists():
            return initial_arrays
        try:
            parts = tree.unnest(tree.unseal(self._file.read_bytes())[0])
            notes = json.loads(bytes(parts["notes"]["json"].numpy()))
            arrays = to_record(decode_order(parts["arrays"]))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{self._file} is no checkpoint ({error}): delete it to start anew") from None
        for name, value in self._identities().items():
            if (before := notes["identity"].get(name, value)) != value:  # a key that it lacks came later
                raise UserError(
                    f"{self._file} was made with {name} = {before!r}, not {value!r}: give that, or another folder"
                )
        self.strategy_state.load(parts.get("strategies", {}), notes["strategies"])
        for one in self.wrappers:
            one.load(parts.get(one.section, {}), arrays)
        self.rounds_done, self.norms = notes["round"], parts.get("norms", {})
        log.info(
            "%s: going on after round %d; Flower counts the rounds that are left from 1",
            type(self).__name__,
            self.rounds_done,
        )
        return arrays

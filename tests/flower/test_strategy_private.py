"""DynaFed needs nothing but the aggregate: not where the server sees only a sum, not where noise was added to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from federation import NODES, ROUNDS, equal, run, train, wrapped
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

GRAIN = 2**20
"""Updates become whole numbers of this unit, modulo 2^32: there, masks cancel exactly and hide everything."""


def mask(one: int, other: int, number: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What two nodes agree on in secret for one round."""
    rng = np.random.default_rng((number, *sorted((one, other))))
    return {name: rng.integers(0, 2**32, array.shape, np.uint32) for name, array in arrays.items()}


def masked(node: int, message: Message) -> RecordDict:
    """The usual client, whose update goes out under a mask with each other node, which that one subtracts."""
    reply = train(node, message)
    if not reply["arrays"]:
        return reply
    before, after = ({name: array.numpy() for name, array in r["arrays"].items()} for r in (message.content, reply))
    hidden = {name: np.round((after[name] - before[name]) * GRAIN).astype(np.int64).astype(np.uint32) for name in after}
    for other in range(1, NODES + 1):
        if other != node:
            sign = np.uint32(1 if node < other else 2**32 - 1)
            secret = mask(node, other, message.content["config"]["server-round"], before)
            hidden = {name: array + sign * secret[name] for name, array in hidden.items()}
    reply["arrays"] = ArrayRecord({name: Array(array) for name, array in hidden.items()})
    return reply


class SumOnly(FedAvg):
    """A server that adds up what it can't read."""

    def __init__(self) -> None:
        super().__init__()
        self.saw: list[dict[str, np.ndarray]] = []

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Iterable[Message]:
        self.global_model = {name: array.numpy() for name, array in arrays.items()}
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        seen = [{name: a.numpy() for name, a in reply.content["arrays"].items()} for reply in replies]
        self.saw += seen
        total = {name: np.sum([one[name] for one in seen], axis=0, dtype=np.uint32) for name in seen[0]}
        mean = {name: array.view(np.int32) / np.float32(GRAIN * len(seen)) for name, array in total.items()}
        new = {name: Array((self.global_model[name] + mean[name]).astype(np.float32)) for name in mean}
        return ArrayRecord(new), None


def test_masked_updates_are_refined_without_being_seen() -> None:
    server = SumOnly()
    _, models = run(wrapped(server), masked)
    _, open_to_all = run(wrapped(FedAvg()))
    # The same as in the open, but for the grain.
    for number in range(ROUNDS + 1):
        assert all(torch.allclose(models[number][n], open_to_all[number][n], atol=1e-4) for n in models[number])
    _, bare = run(SumOnly(), masked)
    assert not any(torch.allclose(models[ROUNDS][name], bare[ROUNDS][name], atol=1e-3) for name in bare[ROUNDS])
    # What arrived are numbers without a pattern: their bits are ones and zeros, equally often, whatever the position.
    bits = np.unpackbits(np.concatenate([one["0.weight"].ravel() for one in server.saw]).view(np.uint8))
    by_position = bits.reshape(-1, 32).mean(axis=0)
    assert abs(by_position - 0.5).max() < 4.5 * 0.5 / np.sqrt(len(bits) / 32)


class Released:
    """Wraps an `aggregate_train` and keeps what it released."""

    def __init__(self, strategy: Any) -> None:
        self.inner, self.models = strategy.aggregate_train, []
        strategy.aggregate_train = self

    def __call__(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = self.inner(server_round, replies)
        self.models.append(arrays.copy())
        return arrays, metrics


def test_all_that_dynafed_does_follows_from_what_was_released_with_noise() -> None:
    """Post-processing: fed with the released models and nothing else, it comes to the same D_syn and models."""
    private = flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.02, 1.0, NODES)
    released = Released(private)
    strategy = wrapped(private)
    _, models = run(strategy)

    class Replayed(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return released.models[server_round - 1], None

    replay = wrapped(Replayed(fraction_evaluate=0))
    _, again = run(replay, lambda node, message: RecordDict())
    assert all(equal(models[number], again[number]) for number in models)
    assert equal(strategy.refiner.state, replay.refiner.state)


@pytest.mark.parametrize("multiplier", [0.0, 0.5])
def test_noise_goes_into_what_is_recorded(multiplier: float) -> None:
    private = flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(), multiplier, 100.0, NODES)
    strategy = wrapped(private)
    run(strategy, rounds=1)
    plain = wrapped(FedAvg())
    run(plain, rounds=1)
    recorded, without = (s.refiner.state["trajectory/000001/0.weight"] for s in (strategy, plain))
    gap = (recorded - without).std()
    assert float(gap) == pytest.approx(multiplier * 100 / NODES, rel=0.3, abs=1e-6)

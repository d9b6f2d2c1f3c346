"""The running mean around Flower's strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import ROUNDS, Diary, Weights, equal, network, run, train, wrapped
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp.strategy import FedAvg, FedAvgM, Strategy
from grid import answer

from dynafed.errors import UserError
from dynafed.flower import Average
from dynafed.flower.records import from_record


def mean(models: list[Weights]) -> Weights:
    return {name: torch.stack([m[name].double() for m in models]).mean(0).to(t.dtype) for name, t in models[0].items()}


def chain(dynafed: bool, folder: Path | None = None, **config: Any) -> tuple[Strategy, Average]:
    """The strategy alone, and with the mean of the last three around it."""
    inner, again = (wrapped(FedAvgM(), folder=f) if dynafed else FedAvgM() for f in (None, folder))
    return inner, Average(again, config={"window": 3} | config, folder=None if dynafed else folder)


@pytest.mark.parametrize("dynafed", [False, True])
def test_the_mean_is_evaluated_and_returned_and_clients_get_the_model(dynafed: bool) -> None:
    evaluated: dict[str, list[Weights]] = {MessageType.TRAIN: [], MessageType.EVALUATE: []}

    def client(node: int, message: Message) -> RecordDict:
        if node == 1:
            evaluated[message.metadata.message_type].append(from_record(message.content["arrays"]))
        return train(node, message)

    bare, averaged = chain(dynafed)
    _, raw = run(bare)
    result, models = run(averaged, client)
    for number in range(1, ROUNDS + 1):
        wanted = mean([raw[n] for n in range(max(1, number - 2), number + 1)])
        assert equal(models[number], wanted), number
        assert equal(evaluated[MessageType.EVALUATE][number - 1], wanted)
        assert equal(evaluated[MessageType.TRAIN][number - 1], raw[number - 1])
    assert equal(from_record(result.arrays), wanted)


@pytest.mark.parametrize("kind", ["last", "exponential"])
@pytest.mark.parametrize("dynafed", [False, True])
def test_it_resumes_with_the_same_bits(dynafed: bool, kind: str, tmp_path: Path) -> None:
    _, whole = run(chain(dynafed, kind=kind)[1])
    with pytest.raises(RuntimeError, match="killed"):
        run(chain(dynafed, tmp_path, kind=kind)[1], diary=Diary(crash_after=5))
    _, models = run(chain(dynafed, tmp_path, kind=kind)[1])
    assert list(models) == list(range(5, ROUNDS + 1))
    assert all(equal(models[number], whole[number]) for number in models)
    result, _ = run(chain(dynafed, tmp_path, kind=kind)[1])  # nothing left to do
    assert equal(from_record(result.arrays), whole[ROUNDS])
    with pytest.raises(UserError, match=r"made with average\.window = 3, not 4"):
        run(chain(dynafed, tmp_path, kind=kind, window=4)[1])


def test_clients_can_get_the_mean() -> None:
    def one_more(node: int, message: Message) -> RecordDict:
        return answer(ArrayRecord({name: Array(a.numpy() + 1) for name, a in message.content["arrays"].items()}))

    strategy = Average(FedAvg(fraction_evaluate=0), config={"window": 2, "clients_get": "mean"})
    _, models = run(strategy, one_more, 3, arrays=ArrayRecord({"w": Array(np.zeros(1, np.float32))}))
    # 0 + 1; (1 + (1 + 1)) / 2; ((1 + 1) + (1.5 + 1)) / 2
    assert [float(models[number]["w"]) for number in range(4)] == [0, 1, 1.5, 2.25]


def test_a_round_without_a_sound_model_leaves_the_mean_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    def client(node: int, message: Message) -> RecordDict:
        number = message.content["config"]["server-round"]
        if number == 2:
            raise RuntimeError("out of memory")
        value = np.nan if number == 4 else float(number)
        return answer(ArrayRecord({"w": Array(np.full(1, value, np.float32))}))

    _, models = run(Average(FedAvg(fraction_evaluate=0)), client, 5, arrays=ArrayRecord({"w": Array(np.zeros(1))}))
    assert [float(models[number]["w"]) for number in range(6)] == pytest.approx([0, 1, 1, 2, 2, 3])
    assert "Average: round 2 has no aggregate" in caplog.text
    assert "'w' holds NaN or infinity" in caplog.text
    assert "Average: round 4 has no aggregate" in caplog.text


def test_it_comes_outside_and_its_settings_are_checked() -> None:
    with pytest.raises(UserError, match="DynaFed can't go around Average: put Average outside"):
        wrapped(Average(FedAvg()))
    with pytest.raises(UserError, match="Average goes around a strategy"):
        Average(network)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"did you mean 'average\.window'"):
        Average(FedAvg(), config={"windw": 3})

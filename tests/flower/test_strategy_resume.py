"""A server app that is killed and started again goes on where it was, with all that its strategy knew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from federation import ROUNDS, SMALL, Diary, equal, initial, run, train, wrapped
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import PrivacyConfig, PrivacySpent
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, FedAvgM, Result, Strategy
from flwr.supercore.privacy_accounting import NeighboringRelation, SamplingMethod
from torch import nn

from dynafed.engine.files import lock_folder
from dynafed.errors import UserError

STRATEGIES = {
    "FedAvg": FedAvg,
    "FedAvgM": lambda: FedAvgM(server_momentum=0.5),
    "FedAdam": lambda: flower.FedAdam(eta=0.01),
    # Without noise on the count, which would be drawn anew, the norm still moves from round to round.
    "adaptive": lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvgM(server_momentum=0.5), 0, 7, clipped_count_stddev=0
    ),
}


class Rounds:
    """The usual client; keeps the numbers of the rounds that it was told."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, node: int, message: Message) -> RecordDict:
        if node == 1 and message.metadata.message_type == "train":
            self.seen.append(message.content["config"]["server-round"])
        return train(node, message)


def crashed(folder: Path, strategy: Strategy, after: int, **changes: Any) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        run(wrapped(strategy, folder=folder, **changes), diary=Diary(crash_after=after))


def resumed(folder: Path, strategy: Strategy, **changes: Any) -> tuple[Result, dict[int, Any]]:
    return run(wrapped(strategy, folder=folder, **changes))


@pytest.mark.parametrize("after", [1, 4, 6])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_killed_server_app_ends_with_the_same_bits(name: str, after: int, tmp_path: Path) -> None:
    _, whole = run(wrapped(STRATEGIES[name]()))
    crashed(tmp_path, STRATEGIES[name](), after)
    client = Rounds()
    result, models = run(wrapped(STRATEGIES[name](), folder=tmp_path), client)
    assert client.seen == list(range(after + 1, ROUNDS + 1))
    assert list(models) == list(range(after, ROUNDS + 1))
    assert all(equal(models[number], whole[number]) for number in models)
    assert list(result.train_metrics_clientapp) == list(result.evaluate_metrics_clientapp) == client.seen
    assert equal(dict(result.arrays.to_torch_state_dict()), whole[ROUNDS])


def test_it_can_be_killed_again_and_again(tmp_path: Path) -> None:
    _, whole = run(wrapped(STRATEGIES["FedAvgM"]()))
    for after in (2, 3, 5, 7):
        crashed(tmp_path, STRATEGIES["FedAvgM"](), after)
    _, models = resumed(tmp_path, STRATEGIES["FedAvgM"]())
    assert equal(models[ROUNDS], whole[ROUNDS])


def test_a_finished_run_is_not_run_again_but_can_go_on(tmp_path: Path) -> None:
    _, whole = run(wrapped(FedAvg()), rounds=10)
    _, first = resumed(tmp_path, FedAvg())
    client = Rounds()
    result, _ = run(wrapped(FedAvg(), folder=tmp_path), client)
    assert client.seen == []
    assert equal(dict(result.arrays.to_torch_state_dict()), first[ROUNDS])
    _, more = run(wrapped(FedAvg(), folder=tmp_path), client, rounds=10)
    assert client.seen == [9, 10]
    assert equal(more[10], whole[10])


def test_lost_rounds_are_not_repeated(tmp_path: Path) -> None:
    def broken(node: int, message: Message) -> RecordDict:
        if message.content["config"]["server-round"] >= 3:
            raise RuntimeError("out of memory")
        return train(node, message)

    run(wrapped(FedAvg(), folder=tmp_path), broken, rounds=4)
    client = Rounds()
    _, models = run(wrapped(FedAvg(), folder=tmp_path), client, rounds=6)
    assert client.seen == [5, 6]
    assert not equal(models[5], models[4])


class Ledger:
    """A privacy accountant that only counts: Flower's own needs another package."""

    config = PrivacyConfig(1e-5, 7, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)

    def __init__(self) -> None:
        self.num_releases = 0

    def compose(self, event: Any, count: int = 1) -> None:
        self.num_releases += count

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        return PrivacySpent(0.1 * self.num_releases, 1e-5, self.num_releases, "count")

    def state_dict(self) -> dict[str, object]:
        return {"releases": self.num_releases}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_releases = state["releases"]


def accounted() -> Any:
    return flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.01, 1.0, 7, accountant=Ledger())  # type: ignore[arg-type]


def test_the_privacy_that_was_spent_stays_spent(tmp_path: Path) -> None:
    crashed(tmp_path, accounted(), after=3)
    strategy = accounted()
    resumed(tmp_path, strategy)
    assert strategy.privacy_spent().num_releases == ROUNDS
    with pytest.raises(UserError, match="privacy accountant"):
        resumed(tmp_path, flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.01, 1.0, 7))


def test_what_doesn_t_belong_together_is_refused(tmp_path: Path) -> None:
    crashed(tmp_path, FedAvg(), after=2)
    with pytest.raises(UserError, match=r"made with dynafed\.samples = 12, not 13"):
        resumed(tmp_path, FedAvg(), config=SMALL | {"samples": 13})
    with pytest.raises(UserError, match="made with seed = 0, not 1"):
        resumed(tmp_path, FedAvg(), seed=1)
    with pytest.raises(UserError, match="made with FedAvg, not FedAvgM"):
        resumed(tmp_path, FedAvgM())
    other = nn.Linear(6, 4)
    with pytest.raises(UserError, match="don't fit the model"):
        run(
            wrapped(FedAvg(), folder=tmp_path, model=lambda: nn.Linear(6, 4)),
            arrays=ArrayRecord(other.state_dict()),
        )
    with lock_folder(tmp_path), pytest.raises(UserError, match="being written to by another process"):
        resumed(tmp_path, FedAvg())


@pytest.mark.parametrize("content", [b"", b"nonsense", b"{}", None])
def test_a_damaged_checkpoint_is_named(content: bytes | None, tmp_path: Path) -> None:
    crashed(tmp_path, FedAvg(), after=2)
    file = tmp_path / "flower.safetensors"
    file.write_bytes(file.read_bytes()[:-50] if content is None else content)
    with pytest.raises(UserError, match=r"flower\.safetensors is no checkpoint .*: delete it to start anew"):
        resumed(tmp_path, FedAvg())


def test_without_a_folder_every_start_is_a_new_one() -> None:
    strategy = wrapped(FedAvg())
    _, first = run(strategy)
    _, second = run(strategy)
    assert equal(first[ROUNDS], second[ROUNDS])
    assert equal(first[0], dict(initial().to_torch_state_dict()))

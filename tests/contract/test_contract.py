"""What every method owes, whichever it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from cases import CASES, METHOD_NAMES, PARTS, config, disturb, everything, iid, run, timeless

import dynafed
from dynafed import tree
from dynafed.callbacks import Callback, Record, RunContext
from dynafed.engine.checkpoint import RunState
from dynafed.engine.federation import Federation
from dynafed.engine.processes import ProcessBackend
from dynafed.engine.run import one_round
from dynafed.engine.traffic import traffic
from dynafed.messages import Broadcast, Update
from dynafed.methods import METHODS, ServerRuntime
from dynafed.settings import describe
from dynafed.tree import Tree

Whole = Callable[[str], dynafed.Result]

EXPECTED = {
    *("fedavg", "fedprox", "scaffold", "feddyn", "moon", "fedmix", "fedgen", "feddf", "fedbe", "abavg", "dynafed"),
    *("fedavgm", "fedadam", "fedyogi", "median", "trimmed-mean", "krum"),
}


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The undisturbed run of a case, once for all tests."""
    done: dict[str, dynafed.Result] = {}

    def get(case: str) -> dynafed.Result:
        if case not in done:
            done[case] = run(case, tmp_path_factory.mktemp("whole") / "run")
        return done[case]

    return get


def test_they_are_all_here_and_say_what_they_are() -> None:
    assert set(METHOD_NAMES) >= EXPECTED
    for name in METHOD_NAMES:
        kind = METHODS.load(name)
        assert kind.summary
        assert any(year in kind.citation for year in map(str, range(2015, 2100)))
        assert all(field["help"] for field in (describe(kind.Settings) if kind.Settings else []))


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_again_with_two_workers_whatever_the_global_generators(
    tmp_path: Path, whole: Whole, case: str
) -> None:
    once = whole(case)
    disturb(1)
    again = run(case, tmp_path / "r", workers=2)
    assert everything(again.state) == everything(once.state)
    assert timeless(again.history) == timeless(once.history)


class Crash(Callback):
    """Ends the run after a round, without a word to the engine."""

    def on_round_end(self, run: RunContext, record: Record) -> None:
        if record["round"] == 3:
            raise SystemExit("crash")


@pytest.mark.parametrize("case", CASES)
def test_resumed_after_a_crash_it_ends_with_the_same_bits(tmp_path: Path, whole: Whole, case: str) -> None:
    with pytest.raises(SystemExit, match="crash"):
        dynafed.run(config(case), out=tmp_path / "r", callbacks=[Crash()], **PARTS)
    assert [folder.name for folder in (tmp_path / "r" / "checkpoint").iterdir()] == ["round-000002"]
    resumed = dynafed.resume(tmp_path / "r", **PARTS)
    assert everything(resumed.state) == everything(whole(case).state)
    assert timeless(resumed.history) == timeless(whole(case).history)


class Tampering(ProcessBackend):
    """In one round, spoils what one client sends, or doesn't let it send at all."""

    def __init__(
        self, federation: Federation, client: int, round_num: int, spoil: Callable[[Update], Update] | None
    ) -> None:
        super().__init__(federation)
        self.client = client
        self.round = round_num
        self.spoil = spoil

    def train(
        self, broadcast: Broadcast, cohort: Iterable[tuple[int, float]], load_state: Callable[[int], Tree]
    ) -> Iterator[tuple[Update, Tree]]:
        for update, memory in super().train(broadcast, cohort, load_state):
            if broadcast.round != self.round or update.client != self.client:
                yield update, memory
            elif self.spoil is not None:
                yield self.spoil(update), memory


def nan_model(update: Update) -> Update:
    name = next(iter(update.model))
    return dataclasses.replace(update, model=update.model | {name: update.model[name] * torch.nan})


def odd_extras(update: Update) -> Update:
    return dataclasses.replace(update, extras={**update.extras, "nobody": {"asked": torch.zeros(1)}})


def bare(update: Update) -> Update:
    return dataclasses.replace(update, extras={})


@pytest.mark.parametrize("round_num", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_rejected_update_leaves_no_trace(tmp_path: Path, case: str, round_num: int) -> None:
    """Nor does it take away what the client remembered before."""
    federation = Federation.create(config(case, participation=1.0), **PARTS)
    spoilers: list[Callable[[Update], Update] | None] = [None, nan_model, odd_extras]
    if federation.methods.extras_spec(federation.problem):
        spoilers.append(bare)
    left = []
    for number, spoil in enumerate(spoilers):
        tampering = Tampering(federation, 2, round_num, spoil)
        state = RunState.initial(federation, tampering, tmp_path / str(number))
        rejected = []
        with tampering as workers:
            for each in range(1, 4):
                before = state.clients.load(2)
                state, record = one_round(federation, state, workers, ServerRuntime())
                rejected += [(each, entry["client"]) for entry in record["rejected"]]
                if each == round_num:
                    assert tree.digest(state.clients.load(2)) == tree.digest(before)
        assert rejected == ([(round_num, 2)] if spoil else [])
        left.append(everything(state))
    assert all(one == left[0] for one in left)


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_declared(whole: Whole, case: str) -> None:
    result = whole(case)
    declared = traffic(result.federation)
    model = tree.nbytes(result.state.model)
    for record in result.history:
        assert record["bytes_up"] == len(record["clients"]) * (model + declared.up)
        assert record["bytes_down"] == 4 * (model + declared.down)
        assert record.get("bytes_enrolment", 0) == (declared.once if record["round"] == 1 else 0)


@pytest.mark.parametrize("case", CASES)
def test_clients_remember_only_what_is_declared(whole: Whole, case: str) -> None:
    result = whole(case)
    assert bool(result.state.clients.rounds) == result.federation.methods.clients[0].needs.client_memory


@pytest.fixture(scope="module")
def fedavg_on_iid(tmp_path_factory: pytest.TempPathFactory) -> float:
    return iid("fedavg", tmp_path_factory.mktemp("iid") / "fedavg")


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_on_iid_data_it_is_no_worse_than_fedavg(tmp_path: Path, fedavg_on_iid: float, method: str) -> None:
    assert fedavg_on_iid > 0.9
    assert iid(method, tmp_path / "r") > fedavg_on_iid - 0.03


@pytest.mark.parametrize("case", CASES)
def test_the_identity_transform_changes_nothing(tmp_path: Path, whole: Whole, case: str) -> None:
    transformed = run(case, tmp_path / "r", update_transforms=["identity"])
    assert everything(transformed.state) == everything(whole(case).state)
    assert timeless(transformed.history) == timeless(whole(case).history)

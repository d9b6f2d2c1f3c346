"""Callbacks: when they are called, what they can do, and what a resumed run tells them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from problems import TEST, TRAIN, run_tiny, tiny

import dynafed
from dynafed import Callback, EarlyStopping, RunContext, UserError, tree
from dynafed.engine.summary import read_metrics

PARTS: dict[str, Any] = {"train": TRAIN, "test": TEST}


class Diary(Callback):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_run_begin(self, run: RunContext) -> None:
        self.calls.append(("run begin", run.round, len(run.history)))

    def on_round_begin(self, run: RunContext, round_num: int) -> None:
        self.calls.append(("round begin", round_num))

    def on_client_result(self, run: RunContext, update: Any) -> None:
        self.calls.append(("client", update.client))

    def on_progress(self, run: RunContext, stage: str, done: int, total: int) -> None:
        self.calls.append((stage, done, total))

    def on_round_end(self, run: RunContext, record: dict[str, Any]) -> None:
        assert record is run.history[-1]
        assert run.round == record["round"]
        assert read_metrics(run.path)[-1] == record
        self.calls.append(("round end", record["round"], tree.digest(run.model)))

    def on_checkpoint(self, run: RunContext, path: Path) -> None:
        assert (path / "state.safetensors").exists()
        self.calls.append(("checkpoint", path.name))

    def on_run_end(self, run: RunContext, result: Any) -> None:
        assert (run.path / "report.html").exists()
        self.calls.append(("run end", result.final_accuracy))

    def on_failure(self, run: RunContext, error: BaseException) -> None:
        self.calls.append(("failure", str(error)))


def test_they_are_called_in_order(tmp_path: Path) -> None:
    diary = Diary()
    result = dynafed.run(tiny(rounds=3), out=tmp_path / "r", callbacks=[diary], **PARTS)
    clients = {record["round"]: [("client", client) for client in record["clients"]] for record in result.history}
    names = [call[:2] for call in diary.calls]
    assert names == [
        ("run begin", 0),
        ("round begin", 1),
        *clients[1],
        ("round end", 1),
        ("round begin", 2),
        *clients[2],
        ("round end", 2),
        ("checkpoint", "round-000002"),
        ("round begin", 3),
        *clients[3],
        ("round end", 3),
        ("checkpoint", "round-000003"),
        ("run end", result.final_accuracy),
    ]
    last = next(call for call in reversed(diary.calls) if call[0] == "round end")
    assert last[2] == tree.digest(result.state.model)


def test_the_synthesis_tells_how_far_it_is(tmp_path: Path) -> None:
    diary, quick = Diary(), {"trajectory": 2, "segment": 1, "targets": [1], "samples": 4, "inner_steps": 1}
    settings = {f"dynafed.{key}": value for key, value in quick.items()} | {"dynafed.iterations": 3}
    dynafed.run(tiny(rounds=3, method="dynafed", **settings), out=tmp_path / "r", callbacks=[diary], **PARTS)
    assert [call for call in diary.calls if call[0] == "synthesis"] == [("synthesis", done, 3) for done in range(4)]


def test_plain_functions_get_the_record_and_the_run_if_they_want(tmp_path: Path) -> None:
    rounds: list[int] = []
    pairs: list[tuple[Path, int]] = []
    functions = [lambda record: rounds.append(record["round"]), lambda run, record: pairs.append((run.path, run.round))]
    dynafed.run(tiny(rounds=2), out=tmp_path / "r", callbacks=functions, **PARTS)
    assert rounds == [1, 2]
    assert pairs == [(tmp_path / "r", 1), (tmp_path / "r", 2)]
    with pytest.raises(UserError, match=r"a callback is a dynafed\.Callback or a function"):
        dynafed.run(tiny(), out=tmp_path / "s", callbacks=[Diary], **PARTS)
    assert not (tmp_path / "s").exists()


class Broken(Callback):
    def on_round_end(self, run: RunContext, record: dict[str, Any]) -> None:
        if record["round"] == 3:
            raise ZeroDivisionError("mine")


@pytest.mark.parametrize("workers", [1, 2])
def test_one_that_raises_ends_the_run_with_its_checkpoint_saved(tmp_path: Path, workers: int) -> None:
    diary = Diary()
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        dynafed.run(tiny(workers=workers), out=tmp_path / "r", callbacks=[Broken(), diary], **PARTS)
    assert f"dynafed resume {tmp_path / 'r'}" in caught.value.__notes__[0]
    assert diary.calls[-1] == ("failure", "mine")
    assert sorted(folder.name for folder in (tmp_path / "r" / "checkpoint").iterdir())[-1] == "round-000003"
    again = Diary()
    resumed = dynafed.resume(tmp_path / "r", callbacks=[again], **PARTS)
    assert again.calls[:2] == [("run begin", 3, 3), ("round begin", 4)]
    assert tree.digest(resumed.state.model) == tree.digest(run_tiny(tmp_path / "whole").state.model)


def test_early_stopping_by_target(tmp_path: Path) -> None:
    config = tiny(rounds=30, optimizer="sgd", lr=0.5)
    whole = dynafed.run(config, out=tmp_path / "whole", **PARTS)
    reached = next(record["round"] for record in whole.history if record["accuracy"] >= 0.6)
    stopped = dynafed.run(config, out=tmp_path / "r", callbacks=[EarlyStopping(target=0.6)], **PARTS)
    assert len(stopped.history) == reached < 30
    assert stopped.summary["stopped"] == f"accuracy reached 0.6 in round {reached}"
    assert stopped.summary["rounds"] == reached
    # Resumed with the same callback, it stays where it is; without, it goes on to the same end.
    again = dynafed.resume(tmp_path / "r", callbacks=[EarlyStopping(target=0.6)], **PARTS)
    assert len(again.history) == reached
    assert tree.digest(dynafed.resume(tmp_path / "r", **PARTS).state.model) == tree.digest(whole.state.model)


def test_early_stopping_by_patience_and_by_config(tmp_path: Path) -> None:
    settings = {"callbacks": ["early-stopping"], "early-stopping.patience": 2}
    config = tiny(rounds=40, lr=1e-9, **settings)  # nothing is learned
    result = dynafed.run(config, out=tmp_path / "r", **PARTS)
    assert len(result.history) == 3
    assert "didn't rise in 2 evaluations" in result.summary["stopped"]
    with pytest.raises(UserError, match=r"early-stopping needs early-stopping\.target or"):
        dynafed.run(tiny(callbacks=["early-stopping"]), out=tmp_path / "s", **PARTS)
    with pytest.raises(UserError, match=r"unknown callback 'early-stoping': did you mean 'early-stopping'"):
        tiny(callbacks=["early-stoping"])
    with pytest.raises(UserError, match=r"unknown key 'early-stopping\.patient'"):
        tiny(callbacks=["early-stopping"], **{"early-stopping.patient": 3})


def test_one_that_stops_before_the_first_round_is_told(tmp_path: Path) -> None:
    class Never(Callback):
        def on_run_begin(self, run: RunContext) -> None:
            run.stop("not today")

    with pytest.raises(UserError, match="stopped before its first round: not today"):
        dynafed.run(tiny(), out=tmp_path / "r", callbacks=[Never()], **PARTS)


def test_if_the_checkpoint_can_t_be_written_the_first_error_still_comes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dynafed.engine.checkpoint.save", full)
    diary = Diary()
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        dynafed.run(tiny(checkpoint_every=100), out=tmp_path / "r", callbacks=[Broken(), diary], **PARTS)
    assert "No space left" in caught.value.__notes__[-1]
    assert diary.calls[-1] == ("failure", "mine")


def test_a_callback_can_be_dropped_with_its_settings(tmp_path: Path) -> None:
    config = tiny(callbacks=["early-stopping"], **{"early-stopping.patience": 1})
    assert "early-stopping" not in config.replace(callbacks=[]).sections
    changed = config.replace(**{"early-stopping.patience": 7})
    assert changed.deciding() == config.deciding()
    assert config.is_execution("early-stopping.patience")
    assert not config.is_execution("mlp.width")

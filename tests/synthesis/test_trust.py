"""What DynaFed does with a trajectory or a synthesis that can't be trusted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from problems import TEST, TRAIN, run_tiny
from test_method import SMALL, bits

import dynafed
from dynafed import tree
from dynafed.seeds import Seeds
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.synthesize import Segments, UntrustedTrajectory, opposing_steps, outlying_steps
from dynafed.tree import Tree


def trajectory(*places: float) -> list[Tree]:
    return [{"w": torch.tensor([place])} for place in places]


PLACES = (0.0, 1.0, 2.0, 3.0, 4.0, -16.0, 5.0, 6.0, 7.0, 8.0, 9.0)
"""A walk of steps of one, but for a leap to -16 and back."""


def test_a_stretch_that_does_not_fit_is_left_out() -> None:
    checkpoints = trajectory(*PLACES)
    assert outlying_steps(checkpoints, 4) == {4, 5}
    everything = Segments(checkpoints, DynaFedSettings(segment=2), Seeds(0))
    assert everything.starts == list(range(9))
    assert everything.left_out == 0
    fitting = Segments(checkpoints, DynaFedSettings(segment=2, outlier_steps=4.0), Seeds(0))
    assert fitting.starts == [0, 1, 2, 6, 7, 8]
    assert fitting.left_out == 3
    for iteration in range(50):
        segment = fitting.draw(iteration)
        assert float(segment.start["w"]) != -16
        assert float(segment.target["w"]) > float(segment.start["w"])
    with pytest.raises(UntrustedTrajectory, match="more than 4 times as long"):
        Segments(checkpoints, DynaFedSettings(segment=6, outlier_steps=4.0), Seeds(0))


def test_a_step_that_is_not_finite_is_left_out() -> None:
    assert outlying_steps(trajectory(0.0, 1.0, 2.0, float("inf"), 3.0, 4.0, 5.0), 4) == {2, 3}


def test_steps_against_the_others_are_left_out() -> None:
    back = trajectory(0.0, 1.0, 2.0, 3.0, 2.5, 2.0, 3.0, 4.0, 5.0)  # two of eight steps go back, and none is long
    assert opposing_steps(back, 0.08) == {3, 4}  # their cosines: 1 with each other, -1 with six; the mean is -5/7
    assert opposing_steps(back, 0.75) == set()
    assert opposing_steps(trajectory(0.0, 1.0, 1.0, float("inf"), 3.0, 4.0), 0.08) == {2, 3}
    fitting = Segments(back, DynaFedSettings(segment=2, outlier_steps=4.0, opposing_steps=0.08), Seeds(0))
    assert fitting.starts == [0, 1, 5, 6]
    with pytest.raises(UntrustedTrajectory, match="every segment has a step against the others"):
        Segments(back, DynaFedSettings(segment=5, outlier_steps=4.0, opposing_steps=0.08), Seeds(0))


def test_an_attacked_round_is_left_out_and_the_metrics_say_so(tmp_path: Path) -> None:
    attack = {"attack__kind": "scaled", "attack__scale": 50.0, "attack__share": 0.5, "attack__rounds": [2, 2]}
    changes = SMALL | attack | {"dynafed__trajectory": 7, "dynafed__segment": 1, "dynafed__outlier_steps": 4.0}
    record = run_tiny(tmp_path / "r", **changes).history[6]
    assert record["segments_left_out"] == 1
    alone = run_tiny(tmp_path / "s", **changes | {"dynafed__segment": 6})
    assert "times as long" in alone.history[6]["synthesis_refused"]
    assert not (tmp_path / "s" / "synthetic.safetensors").exists()


def test_a_synthesis_that_matches_badly_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = SMALL | {"dynafed__max_matching_loss": 0.01}
    refused = run_tiny(tmp_path / "a", **changes)
    assert bits(refused) == bits(run_tiny(tmp_path / "b", rounds=8))
    reasons = {
        record["round"]: record["synthesis_refused"] for record in refused.history if "synthesis_refused" in record
    }
    assert list(reasons) == [4, 8]  # another trajectory is recorded after the first one
    assert "more than dynafed.max_matching_loss = 0.01" in reasons[4]
    assert reasons[4] in caplog.text
    assert "synthesis not used: its matching loss" in (tmp_path / "a" / "report.html").read_text()
    assert not any((tmp_path / "a").glob("synthetic*"))


def test_a_guard_that_finds_nothing_changes_no_bit(tmp_path: Path) -> None:
    guarded: dynafed.Result = run_tiny(
        tmp_path / "a", **SMALL | {"dynafed__outlier_steps": 100.0, "dynafed__max_matching_loss": 100.0}
    )
    assert bits(guarded) == bits(run_tiny(tmp_path / "b", **SMALL))
    assert guarded.history[3]["segments_left_out"] == 0


def test_a_refused_synthesis_restarts_the_run_once(tmp_path: Path) -> None:
    changes = SMALL | {"dynafed__max_matching_loss": 0.01, "dynafed__on_refusal": "restart"}
    result = run_tiny(tmp_path / "a", **changes)
    assert [record["round"] for record in result.history if "restarted" in record] == [4]
    assert [record["round"] for record in result.history if "synthesis_refused" in record] == [4, 8]
    assert "restarted from the initial model" in (tmp_path / "a" / "report.html").read_text()
    stopped = run_tiny(tmp_path / "b", **changes | {"rounds": 4})
    assert tree.digest(stopped.state.model) == tree.digest(stopped.federation.problem.initial_model())
    again = dynafed.resume(tmp_path / "b", train=TRAIN, test=TEST, changes={"rounds": 8})
    assert bits(again) == bits(result)
    trusted = run_tiny(tmp_path / "c", **SMALL | {"dynafed__on_refusal": "restart"})
    assert bits(trusted) == bits(run_tiny(tmp_path / "d", **SMALL))

"""What to try next: only what the run's own evidence speaks for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dynafed.cli import main
from dynafed.config import Config
from dynafed.engine.run import run
from dynafed.suggest import Evidence, _swings, suggestions

UNLIKE = Evidence(
    rounds=30,
    accuracy=0.5,
    swings=0.05,
    mean_gain=None,
    classes_per_client=1,
    classes_if_even=9,
    client_accuracy=0.15,
    average_accuracy=0.5,
    null_share=0.6,
    optimizer="adam",
    rounds_for_dynafed=40,
)


def commands(evidence: Evidence) -> list[str]:
    return [one.command.removeprefix("dynafed run r/config.toml -s ") for one in suggestions(evidence, Path("r"))]


def test_each_suggestion_has_its_own_evidence() -> None:
    average, sgd = "method=fedavg+average", "method=fedavg+average -s optimizer=sgd -s lr=0.05"
    clients = ["method=fedprox+average", "method=dynafed+average -s rounds=40"]
    assert commands(UNLIKE) == [average, sgd, *clients]
    assert commands(replace(UNLIKE, mean_gain=0.06)) == [sgd, *clients]
    assert commands(replace(UNLIKE, optimizer="sgd")) == [average, *clients]
    assert commands(replace(UNLIKE, null_share=0.05, client_accuracy=0.45)) == [average]
    assert "rounds" not in commands(replace(UNLIKE, rounds=50))[-1]
    alike = replace(UNLIKE, classes_per_client=9, swings=0.005, client_accuracy=0.49, null_share=0.05)
    assert commands(alike) == []


def test_swings_are_without_the_trend() -> None:
    assert _swings([0.1, 0.2, 0.1, 0.2]) == pytest.approx(0.1 / 2**0.5)
    assert _swings([0.50, 0.51, 0.52, 0.53]) < 0.0075


def test_a_run_of_skewed_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"dataset": "digits", "clients": 10, "participation": 1.0, "rounds": 12, "workers": 1, "alpha": 0.01}
    base |= {"mlp.width": 16, "lr": 0.005}
    run(Config.load(None, base), out=tmp_path / "r")
    before = sorted(file.stat().st_mtime_ns for file in (tmp_path / "r").rglob("*"))
    assert main(["suggest", str(tmp_path / "r"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["evidence"]["classes_per_client"] <= 2
    assert found["evidence"]["drift"] > 0.1
    assert 0 < found["evidence"]["null_share"] < 1
    assert any("fedprox+average" in one["command"] for one in found["suggestions"])
    assert main(["suggest", str(tmp_path / "r")]) == 0
    assert "1. dynafed run" in capsys.readouterr().out
    assert sorted(file.stat().st_mtime_ns for file in (tmp_path / "r").rglob("*")) == before
    run(Config.load(None, base | {"rounds": 2}), out=tmp_path / "short")
    run(Config.load(None, base | {"rounds": 2, "method": "fedprox"}), out=tmp_path / "other")
    for name, words in (("short", "at least 5"), ("other", "a run of fedprox"), ("nowhere", "no finished run")):
        assert main(["suggest", str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err

"""The chain of a run's rounds: the same after a resume, and broken by any change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from problems import TEST, TRAIN, run_tiny, tiny

import dynafed
from dynafed import UserError, tree
from dynafed.callbacks import Record, RunContext
from dynafed.provenance import verify


def stop_after_two(run: RunContext, record: Record) -> None:
    if record["round"] == 2:
        run.stop("enough")


def test_every_round_is_in_the_chain(tmp_path: Path) -> None:
    changes = {"callbacks": ["provenance"], "attack.kind": "nan", "attack.share": 0.5, "rounds": 4}
    result = run_tiny(tmp_path / "r", **changes)
    content = verify(tmp_path / "r" / "provenance.json")
    first, *rounds = content["entries"]
    assert first["began_after_round"] == 0
    assert "torch" in first["versions"]
    assert [entry["round"] for entry in rounds] == [1, 2, 3, 4]
    assert rounds[-1]["model"] == tree.digest(result.state.final_model)
    for entry, record in zip(rounds, result.history, strict=True):
        assert entry["clients"] == record["clients"]
        assert entry.get("rejected", []) == record["rejected"]
    assert any("NaN" in one["reason"] for entry in rounds for one in entry.get("rejected", ()))


def test_a_resume_goes_on_with_the_chain(tmp_path: Path) -> None:
    once = run_tiny(tmp_path / "once", callbacks=["provenance"], rounds=4)
    config = tiny(callbacks=["provenance"], rounds=4)
    dynafed.run(config, train=TRAIN, test=TEST, out=tmp_path / "r", callbacks=[stop_after_two])
    dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST)
    entries = verify(tmp_path / "r" / "provenance.json")["entries"]
    assert [entry.get("round", "began") for entry in entries] == ["began", 1, 2, "began", 3, 4]
    assert entries[-1]["model"] == verify(once.path / "provenance.json")["entries"][-1]["model"]


def test_a_change_breaks_the_chain(tmp_path: Path) -> None:
    run_tiny(tmp_path / "r", callbacks=["provenance"], rounds=3)
    file = tmp_path / "r" / "provenance.json"
    whole = json.loads(file.read_text())
    other = json.loads(file.read_text())
    other["entries"][2]["clients"] = [0]
    file.write_text(json.dumps(other))
    with pytest.raises(UserError, match="its chain breaks at entry 2"):
        verify(file)
    file.write_text(json.dumps(whole | {"entries": [*whole["entries"][:1], *whole["entries"][2:]]}))
    with pytest.raises(UserError, match="its chain breaks at entry 1"):
        verify(file)
    file.write_text(json.dumps(whole | {"entries": whole["entries"][:-1]}))
    with pytest.raises(UserError, match="last entries are missing"):
        verify(file)
    file.write_text("[]")
    with pytest.raises(UserError, match="is no record of provenance"):
        verify(file)

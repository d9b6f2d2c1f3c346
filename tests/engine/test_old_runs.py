"""A run folder that version 0.1.0 wrote before the engine was redesigned: it resumes and reports."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

import dynafed
from dynafed import Config
from dynafed.report import write_report

OLD = Path(__file__).with_name("old_run")


def test_it_resumes_to_where_a_new_run_comes(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "r")
    resumed = dynafed.resume(tmp_path / "r", changes={"rounds": 5})
    assert [record["round"] for record in resumed.history] == [1, 2, 3, 4, 5]
    assert len(resumed.state.clients.rounds) == 4
    config = Config.load(OLD / "config.toml")
    whole = dynafed.run(config.replace(rounds=5), out=tmp_path / "whole")
    # Bits are promised on one machine, and this one may not be the one that began the run.
    for name, tensor in whole.state.model.items():
        torch.testing.assert_close(resumed.state.model[name], tensor, rtol=1e-3, atol=1e-4)


def test_it_reports(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "r")
    page = write_report([tmp_path / "r"]).read_text()
    assert "scaffold+dynafed" in page

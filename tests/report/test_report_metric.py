"""Runs that learn numbers: listed, reported and compared by the error that they have instead of an accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, FAULTS, Browser
from fake_runs import MakeRun, to_rmse

from dynafed import cli
from dynafed.cli import main
from dynafed.progress import RunProgress
from dynafed.report import write_report
from dynafed.report.load import load_run


def halved(index: int, record: dict[str, Any]) -> None:
    """Half the errors of `to_rmse`."""
    to_rmse(index, record)
    record["rmse"] /= 2


def by_client(index: int, record: dict[str, Any]) -> None:
    """What a run has whose clients hold samples out."""
    to_rmse(index, record)
    record |= {"rmse_before_refine": 1.25, "rmse_worst_tenth": record["rmse"], "mae": 0.1 * index}
    record |= {f"{key}_per_client": {"mercy": 0.75, "general": 1.25} for key in ("rmse", "loss")}


def test_it_sums_a_run_up(make_run: MakeRun) -> None:
    run = load_run(make_run(rounds=7, each=to_rmse))
    assert (run.metric, run.final, run.final_std, run.best) == ("rmse", 1.0, 0.0, (2, 1.0))
    assert run.final_at(2) == 1.5
    shown = RunProgress("fedavg", rounds=7)
    shown.end_round(run.rounds[0])
    assert str(shown).startswith("fedavg: round 1 of 7, rmse 2, ")


def test_runs_are_listed_by_it(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.common.out, "_width", 200)

    def table(*arguments: str) -> list[list[str]]:
        assert main(["runs", *arguments]) == 0
        return [line.split() for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]

    one = make_run("numbers", rounds=3, each=to_rmse)
    head, row = table(str(one), "--columns", "best")
    assert head == ["run", "method", "best", "state", "rounds", "rmse"]
    assert row[2:] == ["1", "done", "3/3", "1.333"]
    head, numbers, classes = table(str(one), str(make_run("classes", rounds=3)))
    assert head[-2:] == ["rmse", "accuracy"]
    assert numbers[-1] == "1.333"
    assert classes[-1] == "%"


def test_a_page_shows_it(make_run: MakeRun) -> None:
    page = write_report([make_run(rounds=7, each=by_client, evaluate="clients")]).read_text()
    assert "<b>1</b> final RMSE; best <b>1</b> in round 2" in page
    assert "<dt>Final RMSE</dt><dd>1<small>±\u202f0 over the last 5</small>" in page
    assert "<dt>Refinement adds</dt><dd>−0.25<small>over the last 5</small>" in page
    assert "on what the clients hold out" in page
    assert "held-out loss" in page
    assert "RMSE by client" in page
    assert "RMSE, worst tenth of the clients" in page
    assert "ccuracy" not in page[page.index("<header") : page.index("The whole config")]


def test_the_lowest_comes_first(make_run: MakeRun, tmp_path: Path) -> None:
    paths = [make_run("a", each=to_rmse, rounds=7), make_run("b", each=halved, rounds=7, method="moon")]
    page = write_report(paths, tmp_path / "both.html").read_text()
    start = page.index('<p class="verdict">')
    verdict = page[start : page.index("</p>", start)]
    assert "moon</b> ends lowest: " in verdict
    assert "0.5</b> RMSE with one seed, 0.5 below" in verdict
    assert 'aria-sort="ascending"' in page
    rows = page[page.index('class="sortable results') :]
    assert rows.index(">moon</td>") < rows.index(">fedavg</td>")


def test_another_metric_is_another_task(make_run: MakeRun, tmp_path: Path) -> None:
    paths = [make_run("a", each=to_rmse, rounds=7), make_run("b", rounds=7, method="moon")]
    page = write_report(paths, tmp_path / "both.html").read_text()
    assert page.count("final RMSE with one seed") == page.count("final accuracy with one seed") == 1
    assert "points above" not in page


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows(make_run: MakeRun, browser: Browser, tmp_path: Path, width: int) -> None:
    paths = [make_run("a", each=by_client, rounds=7), make_run("b", rounds=7, method="moon")]
    assert main(["runs", str(tmp_path), "--page"]) == 0
    for page in (write_report(paths[:1]), write_report(paths, tmp_path / "both.html"), tmp_path / "index.html"):
        browser.open(page, width)
        assert browser.run(FAULTS) == []
        assert browser.errors == []

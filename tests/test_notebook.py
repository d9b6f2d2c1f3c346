"""What notebooks and plain Python show of results, and comparisons of own data and models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from problems import TEST, TRAIN, tiny
from torch import nn

import dynafed
from dynafed import UserError

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def test_a_result_shows_its_curve_and_numbers(finished: dynafed.Result) -> None:
    assert len(repr(finished)) < 400
    page = finished._repr_html_()
    assert page.count("<polyline") == 1
    assert f"{100 * finished.final_accuracy:.2f} %" in page
    assert "fedavg on custom" in page


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dynafed.Comparison]:
    parts = {
        "train": TRAIN,
        "test": TEST,
        "model": lambda: nn.Linear(6, 4),
        "clients": [range(start, 400, 8) for start in range(8)],
        "out": tmp_path_factory.mktemp("compared") / "c",
    }
    return parts, dynafed.compare(tiny(rounds=3), ["fedavg", "fedprox"], [0, 1], vary={"lr": [0.01, 0.1]}, **parts)


def test_own_data_and_models_are_compared(compared: tuple[dict[str, Any], dynafed.Comparison]) -> None:
    _, done = compared
    assert [(row["method"], row["lr"]) for row in done.rows] == [
        ("fedavg", 0.01),
        ("fedprox", 0.01),
        ("fedavg", 0.1),
        ("fedprox", 0.1),
    ]
    assert len(done.records) == 4 * 2 * 3
    assert done.records[0] | {"accuracy": 0} == done.records[0] | {
        "accuracy": 0,
        "method": "fedavg",
        "lr": 0.01,
        "seed": 0,
    }
    curves = done.curves()
    assert list(curves) == ["fedavg-lr=0.01", "fedprox-lr=0.01", "fedavg-lr=0.1", "fedprox-lr=0.1"]
    first = [record["accuracy"] for record in done.records if record["round"] == 1][:2]
    assert curves["fedavg-lr=0.01"][0] == (1, pytest.approx(sum(first) / 2))
    assert repr(done).count("\n") == 4
    page = done._repr_html_()
    assert page.count("<polyline") == 4
    assert page.count("<tr>") == 5


def test_again_it_is_not_run_again_and_other_data_are_refused(
    compared: tuple[dict[str, Any], dynafed.Comparison],
) -> None:
    parts, done = compared
    again = dynafed.compare(tiny(rounds=3), ["fedavg"], [0, 1], vary={"lr": [0.1]}, **parts)
    assert again.rows[0]["final_accuracy"] == done.rows[2]["final_accuracy"]
    with pytest.raises(UserError, match="other data"):
        dynafed.compare(tiny(rounds=3), ["fedavg"], [0], vary={"lr": [0.1]}, **parts | {"train": (-TRAIN[0], TRAIN[1])})
    with pytest.raises(UserError, match="unknown argument 'trian': did you mean 'train'"):
        dynafed.compare(tiny(), ["fedavg"], trian=TRAIN)


def test_tables_and_plots(compared: tuple[dict[str, Any], dynafed.Comparison]) -> None:
    pandas, matplotlib = pytest.importorskip("pandas"), pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    _, done = compared
    frame = done.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == 24
    assert frame.groupby(["method", "lr"])["accuracy"].max().between(0, 1).all()
    axes = done.plot()
    assert [line.get_label() for line in axes.get_lines()] == list(done.curves())


def test_the_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert names["result"].final_accuracy > 0.3
    assert names["comparison"]._repr_html_()

"""The paper's tables and figures: the configs of their cells, the folders, the numbers, the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynafed import Config, UserError, run
from dynafed.cli import main
from dynafed.engine.grid import config_digest
from dynafed.reproduce import cost
from dynafed.reproduce.cells import plan, to_run
from dynafed.reproduce.output import write_outputs
from dynafed.reproduce.paper import experiments, get_experiment
from dynafed.reproduce.records import Record, cell_record, read_records, variants
from dynafed.reproduce.scales import SCALES, cell_command, cell_config, paper_config, scaled
from dynafed.reproduce.tables import result_table

NAMES = {
    *(f"table{number}" for number in range(1, 7)),
    *("figure-curves", "figure-losses", "figure-images", "figure-trajectory-length", "figure-samples"),
    *("figure-distance", "figure-scratch"),
}
TINY = ["-s", "dataset=digits", "-s", "rounds=7", "-s", "clients=6", "-s", "local_steps=2", "--workers", "1"]


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAFED_DATA", raising=False)


def test_the_papers_numbers() -> None:
    known = experiments()
    assert known.keys() == NAMES
    headline = known["table1"].numbers["CIFAR-10, alpha 0.01", "dynafed"]
    assert headline == (65.53, 0.34)
    assert known["table5"].numbers["CINIC-10, alpha 0.04", "fedbe"] == (174.3, 6.8)
    assert known["table6"].numbers["CIFAR-10, alpha 0.16", "abavg"] == (72.05, 0.88)
    assert sum(len(one.numbers) for one in known.values()) == 9 * (9 + 4 + 4 + 4 + 4 + 3)
    with pytest.raises(UserError, match="did you mean 'table1'"):
        get_experiment("tabel1")


def test_at_the_papers_scale_a_baseline_is_the_papers_preset() -> None:
    settings = get_experiment("table1").columns[1].settings
    headline = Config.load("paper-cifar10", {"method": "fedavg+average", "alpha": 0.01})
    config = cell_config(settings, "fedavg", 0, "paper")
    assert config_digest(config) == config_digest(headline)
    assert scaled(config, settings, "fedavg") == {}
    assert paper_config(settings, "dynafed", 0).to_dict()["dynafed"]["inner_lr"] == 1e-5
    ours = scaled(cell_config(settings, "dynafed", 0, "cpu"), settings, "dynafed")
    assert ours["convnet.width"] == (32, 128)
    assert ours["dynafed.inner_lr"] == (0.0, 1e-5)


def test_every_cell_has_a_config_and_a_command_that_makes_the_same(tmp_path: Path) -> None:
    for scale in SCALES:
        for experiment in experiments().values():
            for column in experiment.columns:
                cell_config(column.settings, experiment.methods[-1], 1, scale)
    settings = get_experiment("table3").columns[0].settings
    command = cell_command(settings, "feddf", 2, "cpu", {"lr": 0.01}, tmp_path)
    from dynafed.config import parse_override

    words = command.split()
    changes = dict(parse_override(words[place + 1]) for place, word in enumerate(words) if word == "-s")
    same = cell_config(settings, "feddf", 2, "cpu", {"lr": 0.01})
    assert Config.load(words[2], changes).deciding() == same.deciding()
    assert same.server_samples == 600
    with pytest.raises(UserError, match="--seeds"):
        cell_config(settings, "feddf", 2, "cpu", {"seed": 1})


def test_a_run_is_found_by_its_config_whatever_its_folder_is_called(tmp_path: Path) -> None:
    experiment = get_experiment("table4")
    chosen: dict[str, Any] = {"scale": "smoke", "methods": ["fedavg"], "only": ["MLP 0.01"]}
    chosen["overrides"] = {"dataset": "digits", "rounds": 1, "clients": 4, "workers": 1}
    (new,) = plan(experiment, tmp_path, **chosen)
    assert new.cell.path.parent == tmp_path / "runs"
    run(new.cell.config, out=tmp_path / "elsewhere")
    (found,) = plan(experiment, tmp_path, **chosen)
    assert found.cell.path == tmp_path / "elsewhere"
    assert found.digest == new.digest
    # The model's own accuracy is there without `average`, too.
    run(new.cell.config.replace(method="fedavg", seed=1), out=tmp_path / "plain")
    (plain,) = plan(experiment, tmp_path, seeds=[1], **chosen)
    assert plain.cell.path == tmp_path / "plain"
    record = cell_record("table4", "smoke", plain, {})
    assert record["state"] == "done"
    assert "mean_accuracy" not in record
    with pytest.raises(UserError, match="ConvNet, alpha"):
        plan(experiment, tmp_path, only=["RNN"])


@pytest.mark.usefixtures("no_data")
def test_missing_data_leave_cells_open_and_say_why(tmp_path: Path) -> None:
    experiment = get_experiment("table5")
    planned = plan(experiment, tmp_path, scale="cpu", methods=["fedavg"])
    assert to_run(planned) == []
    assert "dynafed data fetch cinic10" in planned[-1].missing
    (tmp_path / "cinic10_sample2000.npz").touch()
    sampled = plan(experiment, tmp_path, methods=["fedavg"], execution={"data_dir": str(tmp_path)})
    assert "packed sample of 2,000" in sampled[-1].missing
    records = write_outputs(experiment, sampled, tmp_path, "cpu")
    assert records[-1]["state"] == "no data"
    page = (tmp_path / "table5.html").read_text()
    assert "packed sample of 2,000" in page
    assert "189.3 ± 10.5" in page


def test_a_smoke_test_leaves_the_page_and_the_lines_and_is_not_run_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["reproduce", "table4", "figure-curves", "--scale", "smoke", "--methods", "fedavg,dynafed", *TINY]
    arguments += ["--only", "MLP 0.01", "--only", "FashionMNIST 0.01", "-s", "model=mlp", "-s", "mlp.width=8"]
    assert main([*arguments, "--out", str(tmp_path / "a"), "--dry-run"]) == 0
    assert "nothing was run" in capsys.readouterr().out
    assert main([*arguments, "--out", str(tmp_path / "a"), "--collect", "--json"]) == 0
    assert [cell["state"] for cell in json.loads(capsys.readouterr().out)["cells"]] == ["not run"] * 4
    assert main([*arguments, "--out", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    assert "table4.html" in shown
    lines = [json.loads(line) for line in (tmp_path / "a" / "table4.jsonl").read_text().splitlines()]
    assert [line["method"] for line in lines] == ["fedavg", "dynafed"]
    assert all(line["state"] == "done" and line["config"]["mlp"]["width"] == 8 for line in lines)
    assert len(lines[1]["mean_curve"]) == 7
    text = (tmp_path / "a" / "table4.md").read_text()
    assert "65.64 ± 1.69" in text
    assert "dataset = digits (paper: fmnist)" in text
    # FedAvg's first rounds served DynaFed, and both tables have the same runs.
    folders = [*(tmp_path / "a" / "runs").iterdir()]
    assert len(folders) == 2
    assert sorted((folder / "shared").exists() for folder in folders) == [False, True]
    times = [(folder / "summary.json").stat().st_mtime_ns for folder in folders]
    assert main([*arguments, "--out", str(tmp_path / "a"), "--json"]) == 0
    assert [cell["state"] for cell in json.loads(capsys.readouterr().out)["cells"]] == ["done"] * 4
    assert [(folder / "summary.json").stat().st_mtime_ns for folder in folders] == times
    # Stored results stand in for runs.
    stored = ["--results", str(tmp_path / "a" / "table4.jsonl")]
    assert main([*arguments, *stored, "--out", str(tmp_path / "b"), "--dry-run", "--json"]) == 0
    assert [cell["state"] for cell in json.loads(capsys.readouterr().out)["items"]] == ["done"] * 4
    assert main([*arguments, *stored, "--out", str(tmp_path / "b"), "--json"]) == 0
    assert [cell["state"] for cell in json.loads(capsys.readouterr().out)["cells"]] == ["done"] * 4
    assert not (tmp_path / "b" / "runs").exists()
    with pytest.raises(UserError, match="can't be read"):
        read_records([tmp_path / "a" / "table4.html"])


def test_list_has_each_name_once_with_its_cost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < cost._seconds_per_sample("mlp", 8, (1, 8, 8), 32) < 1
    monkeypatch.setattr(cost, "_seconds_per_sample", lambda *about: 1e-4)
    assert main(["reproduce", "list", "--json"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    assert [item["name"] for item in items] == list(experiments())
    assert all(item["smoke"] < min(item["cpu"], item["paper"]) for item in items)
    few = {name: get_experiment(name) for name in ("table6", "figure-losses")}
    monkeypatch.setattr("dynafed.reproduce.paper.experiments", lambda: few)
    assert main(["reproduce", "list"]) == 0
    assert "figure-losses" in capsys.readouterr().out


def fake(experiment: str, column: str, method: str, seed: int = 0, **more: Any) -> Record:
    base = {"name": experiment, "column": column, "method": method, "seed": seed, "state": "done", "done": True}
    curve = [[number, 0.01 * number] for number in range(1, 11)]
    base |= {"scaled": {}, "config": {"alpha": 0.01}, "digest": f"{column}{method}{seed}", "rounds": 10}
    return base | {"curve": curve, "mean_curve": curve, "accuracy": 0.4, "mean_accuracy": 0.5} | more


def test_numbers_are_means_over_seeds_beside_the_papers() -> None:
    experiment, column = get_experiment("table1"), "CIFAR-10, alpha 0.01"
    records = [
        fake("table1", column, "fedavg", 0, accuracy=0.40),
        fake("table1", column, "fedavg", 1, accuracy=0.42, mean_accuracy=0.52),
        fake("table1", column, "dynafed", 0, state="3 of 200 rounds", done=False, scaled={"lr": [1, 2]}),
    ]
    table = result_table(experiment, records)
    fedavg, dynafed = table.rows[column]
    assert fedavg.ours[0] == pytest.approx(41)
    assert fedavg.difference == pytest.approx(41 - 39.3)
    assert fedavg.fedavg_mean == dynafed.fedavg_mean == pytest.approx(51)
    assert fedavg.seeds == (0, 1)
    assert dynafed.texts(False)[1][0] == "3 of 200 rounds"
    assert dynafed.difference is None
    assert table.marks == {dynafed.mark: "lr = 1 (paper: 2)"}


def test_what_was_run_with_another_setting_has_a_row_and_a_baseline_of_its_own() -> None:
    experiment, column = get_experiment("table1"), "CIFAR-10, alpha 0.01"
    other, own = {"optimizer": ["sgd", "adam"]}, {"dynafed.iterations": [5, 1000]}
    records = [
        fake("table1", column, "fedavg", 1, mean_accuracy=0.7, scaled=other, digest="a"),
        fake("table1", column, "dynafed", 1, scaled=other | own, digest="b"),
        fake("table1", column, "dynafed", 0, scaled=own, digest="c"),
        fake("table1", column, "fedavg", 0, digest="d"),
        fake("table1", column, "fedavg", 1, digest="e"),
    ]
    table = result_table(experiment, records)
    found = [(row.method, row.seeds, row.mark, row.fedavg_mean) for row in table.rows[column]]
    sgd = [("fedavg", (1,), "a", pytest.approx(70)), ("dynafed", (1,), "b", pytest.approx(70))]
    assert found == [*sgd, ("fedavg", (0, 1), "", pytest.approx(50)), ("dynafed", (0,), "c", pytest.approx(50))]
    text = "dynafed.iterations = 5 (paper: 1000)"
    assert table.marks == {
        "a": "optimizer = sgd (paper: adam)",
        "b": f"optimizer = sgd (paper: adam), {text}",
        "c": text,
    }
    assert variants(records) == {"a": "optimizer = sgd", "b": "optimizer = sgd", "c": "", "d": "", "e": ""}


def test_commands_for_parts_of_a_table_leave_each_others_cells_in_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["reproduce", "table4", "--scale", "smoke", "--methods", "fedavg", *TINY, "--only", "MLP 0.01"]
    arguments += ["-s", "model=mlp", "-s", "mlp.width=8", "--out", str(tmp_path)]
    for seed in ("0", "1"):
        assert main([*arguments, "--seeds", seed]) == 0
    assert main([*arguments, "-s", "optimizer=sgd", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(shown["cells"]) == 1
    lines = [json.loads(line) for line in (tmp_path / "table4.jsonl").read_text().splitlines()]
    assert [(line["config"]["optimizer"], line["seed"]) for line in lines] == [("sgd", 0), ("adam", 1), ("adam", 0)]
    page = (tmp_path / "table4.html").read_text()
    assert "fedavg, optimizer = sgd" in page
    assert "3 of 3 cells done" in page


def test_rounds_to_a_target_count_only_if_every_seed_reaches_it() -> None:
    experiment, column = get_experiment("table5"), "CIFAR-10, alpha 0.01"
    reached = fake("table5", column, "fedavg", 0, rounds_to_target=12)
    missed = fake("table5", column, "fedavg", 1, rounds_to_target=None)
    row = result_table(experiment, [reached]).rows[column][0]
    assert row.difference == pytest.approx(12 - 132)
    row = result_table(experiment, [reached, missed]).rows[column][0]
    assert row.texts(True)[1][0] == "not reached in 1 of 2 runs, best 10.00 %"


def test_each_figure_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = {"scratch_accuracy": 0.3, "cosine_by_segment": {"D_syn": {"0": 0.1, "1": 0.2}, "noise": {"0": 0.5}}}
    watch = [{"round": 1, "0": {"local": [2.0, 1.0], "aggregated": 3.0, "refined": 1.0}}]
    for name, experiment in experiments().items():
        planned = plan(experiment, tmp_path)

        def made(name: str, scale: str, one: Any, stored: Any) -> Record:
            config = one.cell.config.to_dict()
            return fake(name, one.column.name, one.method, config=config, evidence=evidence, watch=watch)

        monkeypatch.setattr("dynafed.reproduce.output.cell_record", made)
        write_outputs(experiment, planned, tmp_path, "cpu", command="dynafed reproduce")
        page = (tmp_path / f"{name}.html").read_text()
        assert ('data-chart="c0"' in page) == (name != "figure-images")
        assert "30.00 %" in page or name != "figure-scratch"

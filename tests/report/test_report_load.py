from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_runs import MakeRun, synthesis_record

from dynafed.errors import UserError
from dynafed.report import write_report
from dynafed.report.clean import flatten
from dynafed.report.load import find_runs, load_run, read_synthesis


def test_a_finished_run_is_read_whole(make_run: MakeRun) -> None:
    run = load_run(make_run(rounds=12, seed=3))
    assert run.finished
    assert [record["round"] for record in run.rounds] == list(range(1, 13))
    assert run.config["seed"] == 3
    assert run.config["mlp.width"] == 64
    assert run.partition is not None
    assert len(run.partition.counts) == 8
    assert run.notes == ()
    assert run.total("bytes_up") == 12 * 800_000
    assert run.mean("bytes_up") == 800_000
    assert run.total("nothing") is run.mean("nothing") is None


def test_what_is_sent_once_goes_up_in_the_first_round(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        if record["round"] == 1:
            record["bytes_enrolment"] = 3_000_000

    run = load_run(make_run(rounds=12, each=each))
    assert run.values("bytes_up") == [3_800_000] + 11 * [800_000]


def test_the_time_of_a_synthesis_is_parted_from_the_servers(make_run: MakeRun) -> None:
    run = load_run(make_run(rounds=12, each=synthesis_record))
    assert run.syntheses == [8]
    assert run.values("seconds_synthesis") == pytest.approx([20], abs=0.1)
    assert max(run.values("seconds_server")) < 0.4
    measured = make_run("measured", rounds=12, each=lambda i, r: r.update(seconds_synthesis=0.1) if i == 3 else None)
    assert load_run(measured).values("seconds_synthesis") == [0.1]


def test_final_at_an_earlier_round_is_what_was_final_then(make_run: MakeRun) -> None:
    run = load_run(make_run(rounds=12, each=lambda i, r: r.update(accuracy=i / 100)))
    assert run.final_at(6) == pytest.approx(0.04)
    assert run.final_at(12) == run.final_at() == run.final


def test_final_accuracy_is_the_summarys_else_the_mean_of_the_last_five(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        record["accuracy"] = index / 10

    path = make_run(rounds=8, finished=False, each=each)
    run = load_run(path)
    assert run.final == pytest.approx((0.4 + 0.5 + 0.6 + 0.7 + 0.8) / 5)
    assert run.final_std == pytest.approx(0.1 * 2**0.5)
    (path / "summary.json").write_text('{"final_accuracy": 0.25, "final_std": NaN}')
    assert load_run(path).final == 0.25
    assert load_run(path).final_std == pytest.approx(0.1 * 2**0.5)


def test_the_first_of_equal_bests_and_the_first_round_at_the_target(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        record["accuracy"] = [0.1, 0.5, 0.3, 0.5][index - 1]

    run = load_run(make_run(rounds=4, each=each, target_accuracy=0.3))
    assert run.best == (2, 0.5)
    assert run.rounds_to_target == 2
    assert load_run(make_run("far", rounds=4, each=each, target_accuracy=0.9)).rounds_to_target is None
    assert load_run(make_run("none", rounds=4, each=each)).rounds_to_target is None


def test_a_line_cut_by_kill_is_dropped_without_a_word(make_run: MakeRun) -> None:
    path = make_run(rounds=5, finished=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6, "accur')
    run = load_run(path)
    assert len(run.rounds) == 5
    assert not run.finished
    assert run.notes == ()


def test_damage_elsewhere_is_left_out_and_said(make_run: MakeRun) -> None:
    path = make_run(rounds=5)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    lines[1] = lines[1][:20]
    lines[2] = "[1, 2]"
    (path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    (path / "summary.json").write_text("{")
    (path / "partition.json").write_text('{"classes": 3, "counts": [[1, 2]]}')
    (path / "report.json").write_bytes(b"\xff")
    run = load_run(path)
    assert [record["round"] for record in run.rounds] == [1, 4, 5]
    assert not run.finished
    assert run.partition is None
    assert len(run.notes) == 4
    assert any("2 unreadable lines" in note for note in run.notes)


def test_a_round_written_twice_counts_as_last_written(make_run: MakeRun) -> None:
    path = make_run(rounds=3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 2, "accuracy": 0.999}) + "\n")
    run = load_run(path)
    assert [record["round"] for record in run.rounds] == [1, 2, 3]
    assert run.rounds[1]["accuracy"] == 0.999


def test_not_finite_is_none_and_absent_is_absent(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        record["loss"] = float("nan") if index == 2 else 1.0
        if index == 3:
            del record["loss"]

    run = load_run(make_run(rounds=4, each=each))
    assert run.points("loss") == [(1, 1.0), (2, None), (4, 1.0)]
    assert run.values("loss") == [1.0, 1.0]


def test_a_run_before_its_first_round(make_run: MakeRun) -> None:
    path = make_run(finished=False)
    (path / "metrics.jsonl").unlink()
    run = load_run(path)
    assert run.rounds == ()
    assert run.final is run.final_std is run.best is None


def test_runs_are_found_three_levels_down_in_order_and_once(make_run: MakeRun, tmp_path: Path) -> None:
    for name in ("grid/b/x", "grid/a", "grid/c/d/e", "grid/too/deep/for/us"):
        make_run(name, rounds=1)
    (tmp_path / "grid" / "notes.txt").write_text("hello")
    found = find_runs([tmp_path / "grid", tmp_path / "grid" / "a"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["grid/a", "grid/b/x", "grid/c/d/e"]


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "only a config", "nothing"])
def test_what_is_no_run_is_refused_in_one_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    if kind == "file":
        path.write_text("x")
    elif kind != "missing":
        path.mkdir()
    if kind == "only a config":
        (path / "config.toml").write_text("rounds = 1\n")
    with pytest.raises(UserError) as error:
        find_runs([] if kind == "nothing" else [path])
    assert "\n" not in str(error.value)
    assert kind == "nothing" or str(path) in str(error.value)


def test_a_broken_config_is_refused(make_run: MakeRun) -> None:
    path = make_run(rounds=1)
    (path / "config.toml").write_text("rounds = \n")
    with pytest.raises(UserError, match=r"config\.toml is not valid TOML"):
        load_run(path)


def test_one_block_need_not_be_in_a_list(make_run: MakeRun) -> None:
    assert load_run(make_run(rounds=1, blocks={"title": "one"})).blocks == ({"title": "one"},)


def test_flatten() -> None:
    assert flatten({"a": 1, "b": {"c": 2, "d": {"e": 3}}}) == {"a": 1, "b.c": 2, "b.d.e": 3}


def test_torch_is_not_imported_by_the_report_itself() -> None:
    # The package's own __init__ is not ours to judge: it is replaced by an empty one.
    root = Path(sys.modules["dynafed.report"].__path__[0]).parent
    code = (
        "import sys, types; p = types.ModuleType('dynafed'); "
        f"p.__path__ = [{str(root)!r}]; sys.modules['dynafed'] = p; "
        "import dynafed.report; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


ODD = [None, True, -5, 1e308, 10**400, float("nan"), "NaN", "<script>", "\ud800", [], [[1]], {"a": {}}, ["a"]]
ODD_TOML = ["-5", '"<script>"', "[[1]]", "nan", "true", "1979-05-27", "[07:32:00]"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "config.toml", "partition.json"])
def test_odd_values_are_left_out_and_make_a_page_without_them(name: str, make_run: MakeRun) -> None:
    """Run folders come from anybody: nothing in one ends a report with a traceback, or gets into its markup."""
    path = make_run(rounds=6, each=synthesis_record)
    text, scripts = (path / name).read_text(), write_report([path]).read_text("utf-8").count("<script")
    if name == "config.toml":
        keys, odd = [line.partition(" = ")[0] for line in text.splitlines() if " = " in line], ODD_TOML
    else:
        first, more = text.split("\n", 1) if name == "metrics.jsonl" else (text, "")
        keys, odd = list(json.loads(first)), ODD
    for number, key in enumerate(keys):
        for value in (odd[number % len(odd)], odd[(number + 4) % len(odd)]):
            if name == "config.toml":
                (path / name).write_text(re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", text))
            else:
                (path / name).write_text(json.dumps(json.loads(first) | {key: value}) + f"\n{more}")
            assert write_report([path]).read_text("utf-8").count("<script") == scripts


def test_json_that_is_nested_without_end_is_left_out(make_run: MakeRun) -> None:
    path = make_run(rounds=2)
    for name in ("summary.json", "report.json", "partition.json", "metrics.jsonl", "synthesis.jsonl"):
        (path / name).write_text("[" * 100_000)
    run = load_run(path)
    assert run.rounds == ()
    assert len(run.notes) == 3
    assert read_synthesis(path) == {}

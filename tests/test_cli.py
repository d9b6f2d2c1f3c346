"""The command line as a user meets it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from dynafed import __version__
from dynafed.cli import main

FAST = [
    "-s",
    "method=fedavg",
    "-s",
    "rounds=2",
    "-s",
    "clients=4",
    "-s",
    "mlp.width=8",
    "-s",
    "dataset=digits",
    "--workers",
    "1",
]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_run_prints_a_verdict_and_where_the_report_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "demo", *FAST, "--out", "r"]) == 0
    text = capsys.readouterr().out
    assert "fedavg on digits" in text
    assert "r/report.html" in text
    assert Path("r/report.html").stat().st_size > 1000


def test_json_is_exactly_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *FAST, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["rounds"] == 2
    assert Path(summary["path"]).parent == Path("runs")


def test_resume_of_a_finished_run_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", *FAST, "--json", "--out", "r"])
    first = json.loads(capsys.readouterr().out)
    assert main(["resume", "r", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["final_accuracy"] == first["final_accuracy"]


def test_compare_makes_one_table_and_one_report_and_reuses_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "demo", "--methods", "fedavg", *FAST, "--vary", "alpha=0.1,10", "--out", "c", "--json"]
    assert main([*arguments, "--seeds", "0,1"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert [row["alpha"] for row in done["rows"]] == [0.1, 10]
    assert Path("c/report.html").exists()
    written = Path("c/fedavg-alpha=0.1/seed-0/summary.json").stat().st_mtime_ns
    Path("c/fedavg-alpha=0.1/seed-1/summary.json").unlink()
    assert main([*arguments, "--seeds", "0,1,2"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["rows"][0]["seeds"] == [0, 1, 2]
    assert Path("c/fedavg-alpha=0.1/seed-0/summary.json").stat().st_mtime_ns == written
    assert main([*arguments, "--seeds", "0", "-s", "lr=0.5"]) == 2
    assert "another lr" in capsys.readouterr().err
    assert main([argument for argument in arguments if argument != "--json"]) == 0
    assert "final accuracy" in capsys.readouterr().out


def test_report_of_several_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in ("0", "1"):
        main(["run", *FAST, "-s", f"seed={seed}", "--out", f"r{seed}"])
    assert main(["report", "r0", "r1", "-o", "both.html"]) == 0
    assert Path("both.html").exists()
    assert capsys.readouterr().out.endswith("both.html\n")


@pytest.mark.parametrize("command", ["methods", "datasets", "presets"])
def test_listings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 0
    table = capsys.readouterr().out
    assert main([command, "--json"]) == 0
    names = [item["name"] for item in json.loads(capsys.readouterr().out)["items"]]
    assert names
    assert all(name in table for name in names)


def test_synthesize_from_checkpoints_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        safetensors.torch.save_file(
            {name: torch.randn(shape) for name, shape in (("head.weight", (3, 5)), ("head.bias", (3,)))},
            _made(f"t/{number}.safetensors"),
        )
    command = ["synthesize", "--trajectory", "t", "--model", "mlp", "--shape", "5", "--classes", "3", "--out", "s"]
    small = ["-s", "mlp.depth=0", "-s", "dynafed.segment=2", "-s", "dynafed.samples=6", "-s", "dynafed.iterations=4"]
    assert main([*command, *small, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["inner_lr"] > 0
    assert Path("s").exists()
    assert main([*command, *small]) == 0
    assert "6 samples, matching loss" in capsys.readouterr().out
    command[command.index("--shape") + 1] = "five"
    assert main([*command, *small]) == 2
    assert "--shape five" in capsys.readouterr().err


def test_synthesize_from_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    keep = ["-s", "checkpoint_every=1", "-s", "keep_checkpoints=9", "-s", "rounds=4", "-s", "mlp.depth=0"]
    assert main(["run", "demo", *FAST, *keep, "--out", "r"]) == 0
    small = ["-s", "dynafed.segment=2", "-s", "dynafed.samples=6", "-s", "dynafed.iterations=3", "--out", "s"]
    capsys.readouterr()
    assert main(["synthesize", "--trajectory", "r", *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["matching_loss"] > 0
    with safetensors.safe_open("s", "pt") as made:
        assert (made.get_slice("x").get_shape(), json.loads(made.metadata()["dynafed"])["checkpoints"]) == (
            [6, 1, 8, 8],
            4,
        )
    assert main(["synthesize", "--trajectory", "r/checkpoint", *small]) == 2
    assert "synthesize needs --model" in capsys.readouterr().err
    told = ["--model", "mlp", "-s", "mlp.depth=0", "--shape", "1,8,8", "--classes", "10", "--json"]
    assert main(["synthesize", "--trajectory", "r/checkpoint", *told, *small]) == 0
    assert json.loads(capsys.readouterr().out)["matching_loss"] > 0
    for number in (1, 2, 3):
        Path(f"r/checkpoint/round-00000{number}/state.safetensors").unlink()
    assert main(["synthesize", "--trajectory", "r", *small]) == 2
    assert "keep_checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "words"),
    [("os:system", "the model factory failed"), ("builtins:print", "not a torch.nn.Module"), ("os:path", "a module")],
)
def test_synthesize_refuses_what_is_no_model(model: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    _made("t/0.safetensors")
    assert (
        main(["synthesize", "--trajectory", "t", "--model", model, "--shape", "5", "--classes", "3", "--out", "s"]) == 2
    )
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def _made(name: str) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    return path


def test_data_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "fmnist-mini", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["data", "check", "fmnist-mini"]) == 0


def test_fetching_needs_a_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAFED_DATA", raising=False)
    assert main(["data", "fetch", "mnist"]) == 2
    assert "--data-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "demmo"], "did you mean 'demo'"),
        (["run", "-s", "aplha=1"], "did you mean 'alpha'"),
        (["run", "-s", "alpha"], "expected key=value"),
        (["run", "-s", "clients=20000", "-s", "dataset=digits"], "clients"),
        (["run", "-s", "dataset=mnist", "--data-dir", "nowhere"], "nowhere doesn't exist"),
        (["run", "-s", "dataset=mnist", "--data-dir", "."], "mnist"),
        (["run", "-s", "dataset=digits", "--out", "/proc/x"], "can't make the folder"),
        (["compare", "--methods", "fedavg", "--vary", "seed=1,2"], "--seeds"),
        (["resume", "nowhere"], "holds no run"),
        (["report", "nowhere"], "nowhere"),
        (["compare", "--methods", "fedavg", "--seeds", "a"], "whole numbers"),
        (["compare", "--methods", "nosuch"], "unknown method"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_unknown_commands_exit_2() -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fly"])
    assert stopped.value.code == 2


def test_other_packages_print_their_own_messages(capsys: pytest.CaptureFixture[str]) -> None:
    """One that has a handler, as huggingface_hub does, and passes its messages on, must not be printed twice."""
    other = logging.getLogger("other_package")
    handler = logging.StreamHandler()
    other.addHandler(handler)
    before = [*logging.getLogger().handlers]
    try:
        assert main(["presets"]) == 0
        assert logging.getLogger().handlers == before
        capsys.readouterr()
        logging.getLogger("dynafed").warning("ours")
        assert capsys.readouterr().err == "ours\n"
    finally:
        other.removeHandler(handler)


def test_version() -> None:
    done = subprocess.run([sys.executable, "-m", "dynafed", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"dynafed {__version__}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_interrupted_it_saves_says_how_to_go_on_and_exits_130(tmp_path: Path, number: int, workers: str) -> None:
    more = ["-s", "rounds=100000", "--out", "r", "--workers", workers]
    command = [sys.executable, "-m", "dynafed", "run", *FAST, *more]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    metrics = tmp_path / "r" / "metrics.jsonl"
    patience = time.monotonic() + 60
    while time.monotonic() < patience and (not metrics.exists() or metrics.read_text().count("\n") < 3):
        time.sleep(0.02)
    os.killpg(child.pid, number)
    if number == signal.SIGTERM:
        os.killpg(child.pid, number)  # as `timeout` does
    output, error = child.communicate(timeout=60)
    assert child.returncode == 130
    assert error.splitlines()[-1] == "dynafed: interrupted; continue with: dynafed resume r"
    assert "Traceback" not in error
    assert output == ""
    assert list((tmp_path / "r" / "checkpoint").glob("round-*"))


def test_resume_goes_on_to_more_rounds_and_says_why_a_run_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    stop = ["-s", 'callbacks=["early-stopping"]', "-s", "early-stopping.target=0.01"]
    assert main(["run", "demo", *FAST, *stop, "--out", "r[red]:fire:"]) == 0
    text = capsys.readouterr().out
    assert "stopped: accuracy reached 0.01 in round 1" in text
    assert "r[red]:fire:/report.html" in text  # a name is no markup
    assert main(["resume", "r[red]:fire:", "-s", "rounds=3", "-s", "callbacks=[]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 3
    assert main(["resume", "r[red]:fire:", "-s", "alpha=3"]) == 2
    assert "'alpha' decides the run's result" in capsys.readouterr().err

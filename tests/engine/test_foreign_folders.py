"""Run folders from anybody: they destroy nothing outside, run nothing unasked, and a full disk loses nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Faults
from problems import TEST, TRAIN, run_tiny, tiny

import dynafed
from dynafed import Config, RunFailed, UserError, tree
from dynafed.cli import main
from dynafed.engine import files
from dynafed.engine.trust import imported_places, load_run_config
from dynafed.report import write_report

DATA: dict[str, Any] = {"train": TRAIN, "test": TEST}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has two of its rounds left."""
    path = tmp_path_factory.mktemp("half") / "r"
    run_tiny(path, method="scaffold", rounds=4)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("rounds = 4", "rounds = 6"))
    return path


@pytest.fixture
def foreign(half: Path, tmp_path: Path) -> Path:
    shutil.copytree(half, tmp_path / "r")
    return tmp_path / "r"


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder outside, with a file in it; both must stay as they are."""
    (tmp_path / "victim" / "00").mkdir(parents=True)
    file = tmp_path / "victim" / "00" / "precious"
    file.write_text("mine")
    yield file
    assert file.read_text() == "mine"
    assert [path.name for path in (tmp_path / "victim").rglob("*")] == ["00", "precious"]


@pytest.mark.parametrize(
    "name",
    ["clients", "checkpoint", "samples", ".lock", "metrics.jsonl", "synthesis.jsonl", "summary.json", "clients/00"],
)
def test_links_are_refused_before_anything_is_written(name: str, foreign: Path, victim: Path) -> None:
    link = foreign / name
    files.remove(link)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim.parents[1] if link.suffix == "" and name != ".lock" else victim)
    with pytest.raises(UserError, match=f"{name} is a link, and may lead outside the run's folder"):
        dynafed.resume(foreign, **DATA)
    with pytest.raises(UserError, match="is a link"):
        write_report([foreign])


def test_what_a_killed_process_wrote_aside_goes(foreign: Path) -> None:
    left = [foreign / ".config.toml.4711", foreign / ".report.html.1", foreign / "samples" / ".000.png.12"]
    (foreign / "checkpoint" / ".round-000006").mkdir()
    for file in (*left, foreign / "checkpoint" / ".round-000006" / "state.json", foreign / ".mine"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("half")
    dynafed.resume(foreign, **DATA)
    assert {path.name for path in foreign.rglob(".*")} == {".lock", ".mine"}


def test_a_report_and_a_temporary_file_replace_a_link(foreign: Path, victim: Path) -> None:
    link = foreign / f".summary.json.{os.getpid()}"
    link.symlink_to(victim)
    files.write_json(foreign / "summary.json", {"a": float("nan")})
    assert (foreign / "summary.json").read_text() == '{\n "a": null\n}\n'
    (foreign / "log").symlink_to(victim)
    with pytest.raises(RunFailed, match="can't write"):
        files.append_line(foreign / "log", "more")


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "clients/00/0-1.safetensors", ".lock"])
def test_a_folder_in_a_file_s_place_is_one_line(name: str, foreign: Path) -> None:
    files.remove(foreign / name)
    (foreign / name).mkdir(parents=True)
    with pytest.raises(UserError, match=f"{name} is a folder where a run has a file"):
        dynafed.resume(foreign, **DATA)


def test_a_pipe_hangs_nobody(foreign: Path) -> None:
    files.remove(foreign / "metrics.jsonl")
    os.mkfifo(foreign / "metrics.jsonl")
    with pytest.raises(UserError, match="is neither a file nor a folder"):
        dynafed.resume(foreign, **DATA)


@pytest.mark.parametrize("kind", ["file", "empty folder"])
def test_what_lies_in_a_checkpoint_s_place_is_no_obstacle(kind: str, foreign: Path) -> None:
    place = foreign / "checkpoint" / "round-000006"
    place.write_text("no folder") if kind == "file" else place.mkdir()
    resumed = dynafed.resume(foreign, **DATA)
    assert (place / "state.safetensors").is_file()
    assert len(resumed.history) == 6


# Code


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "evil_module:make"},
        {"loss": "evil_module:loss"},
        {"method": "fedavg+evil_module:Step"},
        {"callbacks": ["evil_module:Spy"]},
        {"engine": "evil_module:Backend"},
        {"update_transforms": ["evil_module:T"]},
        {"dataset": "evil_module:load"},
        {"partition": "evil_module:split"},
    ],
)
def test_nothing_that_a_folder_names_is_imported_unasked(
    changes: dict[str, Any], foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil_module.py").write_text("import pathlib; pathlib.Path('executed').touch()\nraise ImportError('x')")
    import tomli_w

    file = foreign / "config.toml"
    file.write_text(tomli_w.dumps(Config.load(file).to_dict() | changes))
    (place,) = imported_places(changes)
    told = json.loads((foreign / "model.json").read_text())
    (foreign / "model.json").write_text(
        json.dumps(told | {key: value for key, value in changes.items() if key in told})
    )
    trajectory = ["--trajectory", str(foreign), "--out", str(tmp_path / "s")]
    samples = ["predict", str(foreign), str(tmp_path / "x.npz")]
    for words in (["resume", str(foreign)], ["audit", str(foreign)], ["synthesize", *trajectory], samples):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert f"would import and run {place}" in said
        assert "add --trust" in said
    write_report([foreign])
    assert not (tmp_path / "executed").exists()


def test_what_is_trusted_is_imported(tmp_path: Path) -> None:
    config = tiny(callbacks=["dynafed.callbacks:Callback"])
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load_run_config(tmp_path, trust=True) == config
    assert load_run_config(tmp_path, trust=config) == config
    with pytest.raises(UserError, match="would import and run dynafed"):
        load_run_config(tmp_path, trust=tiny())
    assert imported_places({"dataset": "hf:mnist", "method": "fedavg", "device": "cuda:0"}) == []


# Faults of the disk


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_at_every_write_is_one_line_and_the_run_goes_on_with_the_same_bits(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_tiny(tmp_path / "whole", method="scaffold", rounds=3, checkpoint_every=1)
    with monkeypatch.context() as patched:
        faults = Faults(patched.setattr, tmp_path / "count", code)
        run_tiny(tmp_path / "count", method="scaffold", rounds=3, checkpoint_every=1)
        writes = faults.done
    assert writes > 30
    for number in range(0, writes, 7 if code == errno.ENOSPC else 23):
        path = tmp_path / f"r{number}"
        with monkeypatch.context() as patched:
            faults = Faults(patched.setattr, path, code)
            faults.left = number
            with pytest.raises((RunFailed, UserError)) as raised:
                run_tiny(path, method="scaffold", rounds=3, checkpoint_every=1)
        assert os.strerror(code) in str(raised.value)
        assert "\n" not in str(raised.value)
        assert not [file for file in path.rglob(".*") if file.is_file() and file.name != ".lock"]
        if (path / "config.toml").exists():
            resumed = dynafed.resume(path, **DATA)
            assert tree.digest(resumed.state.model) == tree.digest(whole.state.model)
        else:
            run_tiny(path, method="scaffold", rounds=1)


# Strict JSON


def test_no_file_holds_nan(tmp_path: Path) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    wild = {"lr": 1e30, "large_updates": "accept", "max_repeats": 0, "max_failed_rounds": 0}
    result = run_tiny(tmp_path / "r", optimizer="sgd", rounds=2, **wild)
    for file in ("metrics.jsonl", "summary.json"):
        for line in (tmp_path / "r" / file).read_text().split("\n}\n" if file == "summary.json" else "\n"):
            if line.strip():
                json.loads(line + ("}" if file == "summary.json" else ""), parse_constant=refuse)
    assert len(result.history) == 2


# What can't be run


def test_config_bombs_and_absurd_numbers_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "bomb.toml"
    for content in (b"a" + b".a" * 200_000 + b" = 1", b"a = " + b"[" * 50_000, b"rounds = 1" + b"0" * 9000, b"\xff"):
        file.write_bytes(content)
        with pytest.raises(UserError) as raised:
            Config.load(file)
        assert len(str(raised.value)) < 300
    for key in ("threads", "workers"):
        with pytest.raises(UserError, match=f"{key} = 1000000 must be at most"):
            tiny(**{key: 1_000_000})
    with pytest.raises(UserError, match="batch_size is too large a number"):
        tiny(batch_size=10**23)
    with pytest.raises(UserError, match=r"model = 'mlp' can't be made with these settings: .*memory") as raised:
        run_tiny(tmp_path / "r", mlp__width=10**11)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "holds NaN or infinity before round 1"), (1j, "is complex")]
)
def test_models_that_cannot_be_averaged_are_refused(value: complex, words: str, tmp_path: Path) -> None:
    class Odd(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 4)
            self.odd = torch.nn.Parameter(torch.full((2,), value))

    with pytest.raises(UserError, match=words):
        dynafed.run(tiny(), model=Odd, **DATA, out=tmp_path / "r")


def test_a_closed_terminal_saves_the_run(tmp_path: Path) -> None:
    def hang_up(record: Any) -> None:
        if record["round"] == 3:
            os.kill(os.getpid(), signal.SIGHUP)

    with pytest.raises(dynafed.Interrupted):
        dynafed.run(tiny(), **DATA, out=tmp_path / "r", callbacks=[hang_up])
    assert (tmp_path / "r" / "checkpoint" / "round-000003").is_dir()

"""Flower's simulation, with Ray: the same files and the same bits as in-process, with one actor or two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from problems import TEST, TRAIN, tiny
from torch import nn

import dynafed
from dynafed import UserError
from dynafed.engine.summary import read_metrics
from dynafed.flower.reaper import PERIOD, ray_processes

CHANGES: dict[str, Any] = {"method": "scaffold", "client_state": "persistent", "rounds": 12, "mlp.width": 8}
SETTINGS = [word for key, value in CHANGES.items() for word in ("-s", f"{key}={value}")]


def files(run: Path) -> dict[str, bytes]:
    """The final state and the clients' memories."""
    found = [run / "checkpoint" / "round-000012" / "state.safetensors", *(run / "clients").glob("*/*")]
    return {str(file.relative_to(run)): file.read_bytes() for file in found}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "dynafed", *words]


def test_interrupted_with_two_actors_and_resumed_with_one(tmp_path: Path) -> None:
    source = tmp_path / "config.toml"
    source.write_text(tiny(**CHANGES, dataset="digits", keep_checkpoints=1).to_toml())
    subprocess.run(command("run", str(source), "--out", str(tmp_path / "local")), check=True, timeout=120)
    words = ("run", str(source), "--out", str(tmp_path / "flower"), "--engine", "flower", "--workers", "2")
    child = subprocess.Popen(command(*words), start_new_session=True, stderr=subprocess.PIPE)
    patience = time.monotonic() + 180
    while len(read_metrics(tmp_path / "flower")) < 3 and child.poll() is None and time.monotonic() < patience:
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 130, errors.decode()
    assert errors.decode().splitlines()[-1].startswith("dynafed: interrupted; continue with: dynafed resume")
    done = len(read_metrics(tmp_path / "flower"))
    assert 3 <= done < 12
    subprocess.run(command("resume", str(tmp_path / "flower"), "--workers", "1"), check=True, timeout=300)
    assert files(tmp_path / "flower") == files(tmp_path / "local")
    names = {path.name for path in (tmp_path / "local").iterdir()}
    assert {path.name for path in (tmp_path / "flower").iterdir()} == names


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_killed_simulation_leaves_no_process_of_ray(tmp_path: Path) -> None:
    settings = [*SETTINGS, "-s", "rounds=1000", "--engine", "flower", "--workers", "1"]
    child = subprocess.Popen(command("run", "demo", *settings, "--out", str(tmp_path / "r")))
    patience = time.monotonic() + 180
    while not read_metrics(tmp_path / "r") and child.poll() is None and time.monotonic() < patience:
        time.sleep(0.1)
    time.sleep(2 * PERIOD)
    found = ray_processes(child.pid)
    child.kill()
    child.wait()
    names = {pid: Path(f"/proc/{pid}/comm") for pid in found}
    assert len(names) >= 4  # the two daemons, an agent of each kind, an actor
    patience = time.monotonic() + 10
    while any(name.exists() for name in names.values()) and time.monotonic() < patience:
        time.sleep(0.1)
    assert [name.read_text() for name in names.values() if name.exists()] == []


def test_a_model_and_arrays_given_in_python(tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)),
        "train": TRAIN,
        "test": TEST,
    }
    config = tiny(**CHANGES).replace(rounds=3, client_memory_mb=0)
    local = dynafed.run(config, out=tmp_path / "local", **parts)
    flower = dynafed.run(config.replace(engine="flower", workers=2), out=tmp_path / "flower", **parts)
    assert flower.state.clients.write_listing() == local.state.clients.write_listing()
    assert flower.summary["final_accuracy"] == local.summary["final_accuracy"]
    final = "checkpoint/round-000003/state.safetensors"
    assert (flower.path / final).read_bytes() == (local.path / final).read_bytes()


NO_FLOWER = "import sys; sys.modules['flwr'] = None; from dynafed.cli import main; sys.exit(main(sys.argv[1:]))"


def test_without_flower_one_line_says_what_to_install(tmp_path: Path) -> None:
    words = ["run", "demo", "--out", str(tmp_path / "r"), "--engine", "flower"]
    done = subprocess.run([sys.executable, "-c", NO_FLOWER, *words], capture_output=True, timeout=120)
    assert done.returncode == 2
    said = "dynafed: engine = 'flower' can't be imported: dynafed.flower needs Flower: pip install dynafed[flower]"
    assert done.stderr.decode().splitlines() == [said]
    assert not (tmp_path / "r").exists()


def test_dynafed_alone_does_not_import_flower() -> None:
    script = "import sys, dynafed.cli; sys.exit('flwr' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_an_engine_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown backend 'flowers': did you mean 'flower'"):
        tiny(engine="flowers")

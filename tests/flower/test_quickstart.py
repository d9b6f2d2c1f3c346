"""What the README and the example promise a user of Flower: in process, and with Flower's own commands."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from grid import LocalGrid, answer

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "flower-quickstart"
BIN = Path(sys.executable).parent
CONFIG = {"num-server-rounds": 7, "recorded-rounds": 6, "fraction-train": 1.0, "iterations": 2, "dynafed": True}


def context(**run_config: Any) -> Context:
    return Context(1, 0, {"partition-id": 0, "num-partitions": 2}, RecordDict(), CONFIG | run_config)


def test_the_readme_s_server_app_runs() -> None:
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if "Grid" in b)
    small = block.replace("num_rounds=100", "num_rounds=3").replace(
        '"trajectory": 20, "samples": 150', '"trajectory": 2, "segment": 1, "iterations": 2, "samples": 10'
    )
    assert small.count("3)") == 1
    assert '"samples": 10}' in small
    names: dict[str, Any] = {}
    exec(compile(small, "README.md", "exec"), names)
    rounds: list[int] = []

    def client(node: int, message: Message) -> RecordDict:
        rounds.append(message.content["config"]["server-round"])
        moved = {name: tensor + 0.01 * node for name, tensor in message.content["arrays"].to_torch_state_dict().items()}
        return answer(type(message.content["arrays"])(moved))

    names["main"](LocalGrid(2, client), context())
    assert set(rounds) == {1, 2, 3}


@pytest.mark.parametrize("dynafed", [True, False])
def test_the_example_s_apps_work_together(
    dynafed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(APP)
    from quickstart import client_app, server_app

    def client(node: int, message: Message) -> RecordDict:
        mine = context()
        mine.node_config["partition-id"] = node - 1
        return client_app.train(message, mine).content

    server_app.main(LocalGrid(2, client), context(dynafed=dynafed))
    accuracy = re.search(r"accuracy over the last 5 rounds: (0\.\d+)", capsys.readouterr().out)
    assert accuracy
    assert float(accuracy[1]) > 0.2


@contextmanager
def superlink(home: Path) -> Iterator[dict[str, str]]:
    """The SuperLink that `flwr run` would start and leave behind; it takes one that is there already."""
    with socket.socket() as one, socket.socket() as two:
        ports = [str(s.getsockname()[1]) for s in (one, two) if s.bind(("127.0.0.1", 0)) is None]
    env = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0],
        "FLWR_LOCAL_CONTROL_API_PORT": ports[1],
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess", "--host", "127.0.0.1"]
    command += ["--control-api-address", f"127.0.0.1:{ports[1]}", "--port", ports[0]]
    process = subprocess.Popen(
        [BIN / command[0], *command[1:]],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        give_up = time.monotonic() + 60
        while not _answers(f"http://127.0.0.1:{ports[0]}/health"):
            assert process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.2)
        yield env
    finally:
        process.terminate()
        process.wait(timeout=30)
        with suppress(ProcessLookupError):  # what it may have left, if something went wrong
            os.killpg(process.pid, signal.SIGKILL)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=1):
            return True
    except OSError:
        return False


def test_flwr_run_works_offline(tmp_path: Path) -> None:
    changes = " ".join(f"{key}={str(value).lower()}" for key, value in CONFIG.items())
    with superlink(tmp_path) as env:
        done = subprocess.run(
            [BIN / "flwr", "run", APP, "--stream", "-c", changes],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=True,
        )
    assert "the aggregate of round 7 is fine-tuned on D_syn" in done.stdout
    assert re.search(r"accuracy over the last 5 rounds: 0\.\d+", done.stdout)

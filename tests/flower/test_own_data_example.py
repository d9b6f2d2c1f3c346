"""The commands of examples/flower-own-data, one after the other: three SuperNodes with TLS and keys, the same bits."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from test_deployment import Federation, free_port, pytestmark  # noqa: F401

from dynafed.engine.summary import read_metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-own-data"
QUICK = 'rounds=2 dynafed.trajectory=2 dynafed.segment=1 dynafed.targets="[1]" dynafed.iterations=2'


def script(port: int, node_ports: int) -> str:
    """The example's commands, on ports that are free, and fewer rounds."""
    blocks = re.findall(r"^```console\n(.*?)^```", (EXAMPLE / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    commands = [command for block in blocks for command in re.split(r"^\$ ", block, flags=re.MULTILINE) if command]
    assert len(commands) == 14
    assert commands.pop(0).startswith("pip install")
    text = "".join(commands).replace("8000", str(port)).replace("8001", str(node_ports))
    text = text.replace("flwr run . ours", f"flwr run . ours -c '{QUICK}'")
    up = f"for i in $(seq 1200); do (: < /dev/tcp/127.0.0.1/{port}) 2> /dev/null && break; sleep 0.1; done\n"
    return "set -e\n" + text.replace("server.key &\n", f"server.key &\n{up}")


@pytest.mark.skipif(not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="makes certificates and keys")
def test_every_command_of_the_example(tmp_path: Path) -> None:
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder)
    federation = Federation(folder)
    try:
        done = subprocess.run(
            ["bash", "-c", script(federation.port, free_port())],
            cwd=folder,
            env=federation.environment,
            stdin=subprocess.DEVNULL,
            stdout=(log := (tmp_path / "log").open("wb")),
            stderr=subprocess.STDOUT,
            timeout=600,
        )
        log.close()
    finally:
        federation.close()
    said = (tmp_path / "log").read_text()
    assert done.returncode == 0, said
    assert "the same bits on three nodes and in one process" in said
    assert [record["clients"] for record in read_metrics(folder / "runs" / "own-data")] == [[0, 1, 2]] * 2
    for number in range(3):
        assert [path.name for path in (folder / f"hospital{number}").iterdir()] == ["data.npz"]

"""A real federation on this machine: a SuperLink with TLS, three SuperNodes that it knows by key; and trouble."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from nodes import QUICK

import dynafed
from dynafed import Config
from dynafed.engine.summary import read_metrics
from dynafed.flower.environment import DEFAULTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

NODES = 3
SCRIPTS = Path(sys.executable).parent
CONFIG: dict[str, Any] = {
    "method": "scaffold+dynafed",
    "rounds": 3,
    "clients": NODES,
    "participation": 1.0,
    "local_steps": 3,
    "optimizer": "sgd",
    "lr": 0.1,
    "checkpoint_every": 1,
    "mlp.width": 8,
    **QUICK,
}


def test_neither_a_killed_server_app_nor_a_killed_node_loses_anything(tmp_path: Path, federation: Federation) -> None:
    federation.register(*(f"node{number}" for number in range(NODES)))
    nodes = [federation.node(f"node{number}", number) for number in range(NODES)]
    make_key(tmp_path / "stranger")
    stranger = federation.node("stranger", 0)
    out, local = tmp_path / "flower", tmp_path / "local"
    federation.run(out)
    federation.wait(lambda: saved(out, 1))
    federation.kill("flwr-serverapp")
    federation.run(out)
    dynafed.run(Config.load(None, CONFIG | {"rounds": 2, "dynafed.targets": [1]}), out=local)
    federation.wait(lambda: "ROUND 3]" in federation.log("node1"))
    assert tensors(out, 2) == tensors(local, 2)
    federation.end(nodes[1])
    federation.wait(lambda: (out / "summary.json").exists())
    records = read_metrics(out)
    assert [record["clients"] for record in records] == [[0, 1, 2], [0, 1, 2], [0, 2]]
    assert [each["client"] for each in records[2]["rejected"]] == [1]

    assert stranger.wait(60) != 0
    assert "Failed to activate SuperNode" in federation.log("stranger")


GARBAGE = """
import sys

if "flwr-clientapp" in sys.argv[0]:
    from flwr.app import Array

    honest = Array.deflate

    def deflate(self):
        content = honest(self)
        head, divider, body = content.partition(b"\\x00")
        return head + divider + b"\\xff" * len(body)

    Array.deflate = deflate
"""
"""In the place of a node's `sitecustomize`: every array that it sends is one that Flower can't decode."""


def test_lying_nodes_change_nothing(tmp_path: Path, federation: Federation) -> None:
    names = ("node0", "node1", "node2", "thief", "one", "none")
    federation.register(*names)
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{n} {(tmp_path / f'node{n}.pub').read_text()}\n" for n in range(NODES)))
    lies = tmp_path / "lies"
    lies.mkdir()
    (lies / "sitecustomize.py").write_text(GARBAGE)
    federation.node("one", 0, 1)
    federation.node("none", 0, 0)
    federation.node("thief", 0)
    federation.node("node0", 0)
    federation.node("node1", 1)
    federation.node("node2", 2, PYTHONPATH=os.pathsep.join([str(lies), os.environ.get("PYTHONPATH", "")]))
    out = tmp_path / "flower"
    log = federation.run(out, "--stream", method="fedavg", rounds=2, **{"dynafed-node-keys": str(keys)})
    records = read_metrics(out)
    assert [record["clients"] for record in records] == [[0, 1], [0, 1]]
    for record in records:
        (rejected,) = record["rejected"]
        assert rejected["client"] == 2
        assert rejected["reason"].startswith("its answer can't be read: UnicodeDecodeError")
    for reason in (
        "its num-partitions = 1, the server's is 3",
        "its partition-id = 0 is not below its num-partitions = 0",
        "its public key is not in the list of dynafed-node-keys",
    ):
        assert len(re.findall(rf"node \d+ can't take part: {reason}", log)) == 1, log


def saved(run: Path, round_num: int) -> bool:
    return (run / "checkpoint" / f"round-{round_num:06d}").exists()


def tensors(run: Path, round_num: int) -> bytes:
    """The model, the trajectory, D_syn and the control variate, bit for bit."""
    return (run / "checkpoint" / f"round-{round_num:06d}" / "state.safetensors").read_bytes()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    started = Federation(tmp_path)
    try:
        started.serve()
        yield started
    finally:
        started.close()


class Federation:
    """One SuperLink, and SuperNodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.environment = (
            os.environ
            | DEFAULTS
            | {
                "FLWR_HOME": str(folder / "home"),
                "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
                "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
                "OMP_NUM_THREADS": "1",
                "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
            }
        )

    def serve(self) -> None:
        certify(self.folder)
        home, app = self.folder / "home", self.folder / "app"
        home.mkdir()
        app.mkdir()
        address = f"127.0.0.1:{self.port}"
        link = {"address": address, "root-certificates": str(self.folder / "ca.pem")}
        (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "test", "test": link}}))
        self.start(
            "superlink",
            *("flower-superlink", "--host", "127.0.0.1", "--port", str(self.port), "--enable-supernode-auth"),
            *("--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"),
        )
        self.wait(lambda: socket.socket().connect_ex(("127.0.0.1", self.port)) == 0)

    def register(self, *names: str) -> None:
        """Make keys that the SuperLink lets in."""
        keys = [make_key(self.folder / name) for name in names]
        registered = [self.start(f"{key.name}.log", "flwr", "supernode", "register", str(key), "test") for key in keys]
        assert [process.wait(300) for process in registered] == [0] * len(names)

    def node(
        self, name: str, partition: int, num_partitions: int = NODES, **environment: str
    ) -> subprocess.Popen[bytes]:
        return self.start(
            name,
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--root-certificates", "ca.pem"),
            *("--auth-supernode-private-key", name, "--port", str(free_port()), "--max-retries", "3"),
            "--node-config",
            f'partition-id={partition} num-partitions={num_partitions} dynafed-memory="{self.folder / name}-memory"',
            **environment,
        )

    def run(self, out: Path, *words: str, **changes: Any) -> str:
        """Start the app, which goes on by itself; returns what the command says."""
        components = {"serverapp": "dynafed.flower:server_app", "clientapp": "dynafed.flower:client_app"}
        config = CONFIG | {"dynafed-out": str(out), "dynafed-timeout": 300.0} | changes
        project = {
            "project": {"name": "federation", "version": "1.0.0", "license": "MIT"},
            "tool": {"flwr": {"app": {"publisher": "tests", "components": components, "config": config}}},
        }
        (self.folder / "app" / "pyproject.toml").write_text(tomli_w.dumps(project))
        return self.flwr("run", "app", "test", *words)

    def flwr(self, *words: str) -> str:
        done = subprocess.run(
            [str(SCRIPTS / "flwr"), *words], cwd=self.folder, env=self.environment, capture_output=True, timeout=300
        )
        output = done.stdout.decode() + done.stderr.decode()
        assert done.returncode == 0, output
        return output

    def start(self, name: str, program: str, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(SCRIPTS / program), *words],
                cwd=self.folder,
                env=self.environment | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait(self, true: Callable[[], bool], seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                logs = "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in self.folder.glob("*.log"))
                raise AssertionError(f"nothing for {seconds} seconds\n{logs}")
            time.sleep(0.1)

    def kill(self, program: str) -> None:
        """kill -9 of this federation's process of that name."""
        (found,) = (pid for pid in self.ours() if program in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(found, signal.SIGKILL)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """kill -9 of a process and all that it started."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def ours(self) -> list[int]:
        """The processes that were started for this federation, by whomever."""
        mark, found = f"FLWR_HOME={self.folder / 'home'}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                pass
        return found

    def close(self) -> None:
        for pid in self.ours():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_key(path: Path) -> Path:
    """A SuperNode's private key, and beside it the public one, which is returned."""
    key = ec.generate_private_key(ec.SECP384R1())
    secret = serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, secret))
    public = path.with_name(f"{path.name}.pub")
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return public


def certify(folder: Path) -> None:
    """A certificate authority, and a certificate of its for a server on this machine."""
    now = datetime.datetime.now(datetime.UTC)
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ca", "server")}
    names = {name: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in keys}
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])
    for name, key in keys.items():
        certificate = (
            x509.CertificateBuilder()
            .subject_name(names[name])
            .issuer_name(names["ca"])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
            .add_extension(here, critical=False)
            .sign(keys["ca"], hashes.SHA256())
        )
        (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )

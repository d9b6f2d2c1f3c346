"""Flower's simulation on a Ray cluster that is there already: a head and a second raylet; the same bits."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from problems import TEST, TRAIN, tiny
from torch import nn

import dynafed

pytest.importorskip("flwr")
ray = pytest.importorskip("ray")


class Tells(nn.Sequential):
    """Leaves a file for each of Ray's machines that trains it."""

    def train(self, mode: bool = True) -> Tells:
        if mode and ray.is_initialized():
            context = ray.get_runtime_context()
            if context.worker.mode == ray.WORKER_MODE:
                Path(os.environ["TELLS"], context.get_node_id()).touch()
        return super().train(mode)


def network() -> nn.Module:
    return Tells(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    told = tmp_path / "told"
    told.mkdir()
    monkeypatch.setenv("TELLS", str(told))
    folder = tempfile.mkdtemp(prefix="ray")  # short: sockets lie in it; not Ray's own, where other tests would find it
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        started.add_node(num_cpus=1)
        started.wait_for_nodes(60)
        monkeypatch.setenv("RAY_ADDRESS", started.address)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def test_two_machines_train_and_the_bits_are_the_same(tmp_path: Path, cluster: Any) -> None:
    config = tiny(method="scaffold", client_state="persistent", rounds=3, participation=1.0)
    parts: dict[str, Any] = {"model": network, "train": TRAIN, "test": TEST}
    local = dynafed.run(config, out=tmp_path / "local", **parts)
    ray_run = dynafed.run(config.replace(engine="flower"), out=tmp_path / "ray", **parts)
    assert len(list((tmp_path / "told").iterdir())) == 2
    files = {file.relative_to(local.path) for file in local.path.glob("c*/**/*.safetensors")}
    assert len(files) > 1
    for file in files:
        assert (ray_run.path / file).read_bytes() == (local.path / file).read_bytes()


def test_a_cluster_that_nobody_asked_for_is_left_alone(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    parts: dict[str, Any] = {"model": network, "train": TRAIN, "test": TEST}
    dynafed.run(tiny(rounds=1, engine="flower"), out=tmp_path / "ray", **parts)
    here = {Path(file).name for file in (tmp_path / "told").iterdir()}
    assert here
    assert not here & {node.node_id for node in cluster.list_all_nodes()}

"""examples/minimal.py, the method in plain torch, and the engine give the same weights."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import TEST, TRAIN
from torch import nn

import dynafed
from dynafed.seeds import Seeds

FILE = Path(__file__).parents[1] / "examples/minimal.py"
SEED, CLIENTS = 3, 6


def imported() -> Any:
    spec = importlib.util.spec_from_file_location("minimal", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


minimal = imported()

SETTINGS = minimal.Settings(
    rounds=8, clients_per_round=3, local_epochs=2, batch_size=16, trajectory=5, segment=2, samples=12, iterations=25,
    inner_steps=4, finetune_lr=1e-2, finetune_steps=5,
)  # fmt: skip
FEDERATION = ("rounds", "clients_per_round", "local_epochs", "batch_size", "lr")


def engine_rng(purpose: str, *where: int) -> np.random.Generator:
    """The engine's own keys: those of a synthesis belong to a seed of their own, a sample to its first attempt."""
    seeds = Seeds(SEED)
    if purpose in ("synthetic", "segment"):
        seeds = Seeds(seeds.key("dynafed", SETTINGS.trajectory) % 2**63)
    return seeds.rng(purpose, *where, *((0,) if purpose == "sample" else ()))


@pytest.mark.parametrize("method", ["fedavg", "dynafed"])
def test_the_engine_gives_the_same_weights(method: str, tmp_path: Path) -> None:
    with Seeds(SEED).torch_seeded("model"):
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    split = minimal.dirichlet_split(TRAIN[1], CLIENTS, 0.1, minimal.seeded(SEED)("split"))
    clients = [tuple(torch.from_numpy(part[rows]) for part in TRAIN) for rows in split]
    *_, plain = minimal.federate(net, clients, SETTINGS, engine_rng, dynafed=method == "dynafed")

    chosen = dataclasses.asdict(SETTINGS)
    config = {key: chosen.pop(key) for key in FEDERATION} | {"method": method, "seed": SEED, "workers": 1}
    if method == "dynafed":
        config["dynafed"] = chosen | {"target_draw": "last", "distance": "l2", "inner_rates": "single"}
    result = dynafed.run(
        dynafed.Config.from_dict(config),
        model=lambda: copy.deepcopy(net),
        train=TRAIN,
        test=TEST,
        clients=split,
        out=tmp_path / "run",
    )
    moved = max((plain[name] - tensor).abs().max().item() for name, tensor in net.named_parameters())
    assert moved > 0.02
    torch.testing.assert_close(dict(result.state.model), plain, rtol=1e-4, atol=1e-5)


def test_the_split_deals_every_row_once() -> None:
    split = minimal.dirichlet_split(TRAIN[1], 8, 0.01, np.random.default_rng(0))
    assert [len(rows) for rows in split] == [50] * 8
    assert sorted(np.concatenate(split)) == list(range(400))
    assert np.mean([len(set(TRAIN[1][rows])) for rows in split]) < 2.5


def test_it_is_one_page_of_plain_torch() -> None:
    text = FILE.read_text("utf-8")
    assert len(text.splitlines()) <= 150
    assert "import dynafed" not in text
    assert "from dynafed" not in text


def test_it_reads_the_built_in_images() -> None:
    x, y = minimal.load(minimal.BUILTIN, "test")
    assert x.shape == (2000, 1, 28, 28)
    assert abs(float(x.mean())) < 0.1
    assert y.unique().tolist() == list(range(10))

"""Smaller updates: what is lost, what stays, and how many bytes it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flower.nodes import backend_on_nodes
from problems import TEST, TRAIN, run_tiny, tiny

import dynafed
from dynafed import tree
from dynafed.messages import Broadcast, Update
from dynafed.seeds import Seeds
from dynafed.transforms import TransformChain

START = {"w": torch.zeros(2, 5), "n": torch.tensor(3)}
CHANGE = torch.tensor([[0.0, -4.0, 1.0, 0.5, 2.0], [0.1, 0.2, -0.3, 3.0, 0.4]])


def sent_and_read(*names: str, **settings: float) -> tuple[Update, Update]:
    chain = TransformChain.of(tiny(update_transforms=list(names), **settings))
    broadcast = Broadcast(2, START)
    update = Update(1, {"w": CHANGE, "n": torch.tensor(5)}, 1, 1, 0.0, 0.0)
    encoded = chain.encode(update, broadcast, Seeds(0))
    return encoded, chain.decode(encoded, broadcast)


def test_the_largest_changes_are_sent() -> None:
    encoded, read = sent_and_read("top-k", **{"top-k__share": 0.3})
    expected = torch.zeros(2, 5)
    expected[0, 1], expected[0, 4], expected[1, 3] = -4.0, 2.0, 3.0
    assert torch.equal(read.model["w"], expected)
    assert read.model["n"] == 5
    assert tree.nbytes(encoded.model) == 3 * (4 + 4) + 8


def test_eight_bits_are_right_on_average() -> None:
    encoded, read = sent_and_read("8-bit")
    assert encoded.model["w/steps"].dtype == torch.int8
    assert float((read.model["w"] - CHANGE).abs().max()) <= 4 / 127
    chain = TransformChain.of(tiny(update_transforms=["8-bit"]))
    means = torch.zeros(2, 5)
    for number in range(400):
        broadcast = Broadcast(number, START)
        update = Update(1, {"w": CHANGE, "n": torch.tensor(5)}, 1, 1, 0.0, 0.0)
        means += chain.decode(chain.encode(update, broadcast, Seeds(0)), broadcast).model["w"] / 400
    assert float((means - CHANGE).abs().max()) < 0.005
    still = Update(1, START, 1, 1, 0.0, 0.0)
    assert torch.equal(chain.decode(chain.encode(still, broadcast, Seeds(0)), broadcast).model["w"], START["w"])


@pytest.mark.parametrize(("name", "share"), [("top-k", 0.25), ("8-bit", 0.4)])
def test_fewer_bytes_and_the_same_bits_everywhere(tmp_path: Path, name: str, share: float) -> None:
    plain = run_tiny(tmp_path / "plain", rounds=2)
    once = run_tiny(tmp_path / "once", rounds=2, update_transforms=[name])
    assert once.summary["bytes_up"] < share * plain.summary["bytes_up"]
    assert not once.history[0]["rejected"]
    two = run_tiny(tmp_path / "two", rounds=2, update_transforms=[name], workers=2)
    config = tiny(rounds=2, update_transforms=[name], engine="flower")
    flower = dynafed.run(config, train=TRAIN, test=TEST, out=tmp_path / "flower", backend=backend_on_nodes)
    assert tree.digest(once.state.model) == tree.digest(two.state.model) == tree.digest(flower.state.model)


def test_places_out_of_reach_are_rejected() -> None:
    chain = TransformChain.of(tiny(update_transforms=["top-k"]))
    wrong = {"w/places": torch.tensor([99], dtype=torch.int32), "w/values": torch.ones(1), "n": torch.tensor(3)}
    assert "top-k can't decode it" in chain.decode(Update(1, wrong, 1, 1, 0.0, 0.0), Broadcast(1, START)).failure

"""Secure aggregation: the sum is that of the plain updates, and a single one tells nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower.nodes import backend_on_nodes
from methods.by_hand import federation_for
from problems import TEST, TRAIN, run_tiny, tiny

import dynafed
from dynafed import UserError, tree
from dynafed.callbacks import Record, RunContext
from dynafed.engine.server import server_update
from dynafed.messages import Broadcast, Update
from dynafed.secure_aggregation import MASKED, SCALE, Mask, SecureSum, Session, invite, reconstruct, shares
from dynafed.seeds import Seeds

START = {"w": torch.zeros(3), "n": torch.tensor(3)}
SEEDS = Seeds(0)
CLIENTS = (2, 5, 6, 9)


def session(start: dict[str, torch.Tensor] | None = None, **changes: Any) -> tuple[Mask, Broadcast]:
    config = tiny(secure_aggregation=True, **changes)
    return Mask(config), invite(config, SEEDS, Broadcast(4, start or START), CLIENTS, 0)


def update_of(client: int, *values: float, examples: int = 1, steps: int = 3) -> Update:
    return Update(client, {"w": torch.tensor(values), "n": torch.tensor(steps)}, examples, 1, float(client), 0.0)


SENT = [
    update_of(2, 1.0, -2.0, 0.25, examples=10, steps=4),
    update_of(5, 3.0, 0.5, 0.0, examples=30, steps=8),
    update_of(9, 0.5, 4.5, 1.25, examples=40, steps=9),
]


@pytest.mark.parametrize(
    ("weighting", "expected", "steps"),
    [("uniform", [1.5, 1.0, 0.5], 7), ("examples", [1.5, 2.1875, 0.65625], 8)],
)
def test_the_mean_of_those_who_sent_something(weighting: str, expected: list[float], steps: int) -> None:
    """Client 6 dropped out after the masks were agreed upon. By examples, n is (40 + 240 + 360) / 80 = 8."""
    mask, broadcast = session(weighting=weighting)
    server = SecureSum(mask.config, SEEDS, broadcast, {})
    (mean,) = server.mean(mask.encode(update, broadcast, SEEDS) for update in SENT)
    assert mean.model["w"].tolist() == expected
    assert int(mean.model["n"]) == steps
    assert mean.members == (2, 5, 9)
    assert mean.examples == 80
    assert mean.loss == (2 * 10 + 5 * 30 + 9 * 40) / 80
    assert server.recovered == 1
    assert server.bytes_down == 4 * 3 * 32
    assert server.bytes_up == 4 * 3 * 32 + 4 * 16 + 3 * 4 * 16


def test_what_is_sent_beside_the_model_is_summed_too() -> None:
    mask, broadcast = session()
    extras = [{"scaffold": {"c": torch.tensor([float(number), 1.0])}} for number in (1, 2, 6)]
    server = SecureSum(mask.config, SEEDS, broadcast, {"scaffold": {"c": torch.zeros(2)}})
    sent = [replace(update, extras=extra) for update, extra in zip(SENT, extras, strict=True)]
    (mean,) = server.mean(mask.encode(update, broadcast, SEEDS) for update in sent)
    assert mean.extras["scaffold"]["c"].tolist() == [3.0, 1.0]


def test_with_half_of_the_clients_nothing_is_unmasked() -> None:
    mask, broadcast = session()
    server = SecureSum(mask.config, SEEDS, broadcast, {})
    assert list(server.mean(mask.encode(update, broadcast, SEEDS) for update in SENT[:2])) == []


def test_a_single_masked_update_looks_uniform() -> None:
    """Of zeros and of a large constant: bytes are equally frequent, and both differ in half of their bits."""
    size = 40_000
    mask, broadcast = session({"w": torch.zeros(size)})
    encoded = [
        mask.encode(Update(5, {"w": torch.full((size,), value)}, 1, 1, 0.0, 0.0), other, SEEDS).model[MASKED]
        for value, other in [(0.0, broadcast), (1000.0, broadcast), (0.0, replace(broadcast, round=5))]
    ]
    for masked in encoded:
        counts = np.bincount(masked.numpy().view(np.uint8), minlength=256)
        expected = counts.sum() / 256
        assert ((counts - expected) ** 2 / expected).sum() < 400  # chi-squared with 255 degrees: 5 sigma is 368
    differing = np.unpackbits((encoded[0].numpy() ^ encoded[2].numpy()).view(np.uint8)).mean()
    assert differing == pytest.approx(0.5, abs=0.002)


def test_shares_give_the_secret_if_they_are_enough() -> None:
    _, broadcast = session()
    here = Session.of(broadcast)
    assert here.threshold == 3
    values = shares(SEEDS, here, "self", 5, [0, 1, 2, 3, 4])
    assert reconstruct((1, 2, 3), values[1:4]) == reconstruct((1, 3, 4), [values[1], values[3], values[4]]) == values[0]
    assert reconstruct((1, 2), values[1:3]) != values[0]


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (update_of(5, 6e8, 0.0, 0.0), "6e[+]08 doesn't fit into the sum of 4 clients: at most 5.37e[+]08"),
        (update_of(5, float("nan"), 0.0, 0.0), "NaN"),
        (update_of(5, 3.0, 4.0, 0.0), "norm 5 is too large: at most 2"),
    ],
)
def test_a_client_checks_its_own_update(update: Update, words: str) -> None:
    limit = 2.0 if update.model["w"][0] == 3 else 1e12
    mask, broadcast = session(max_update_norm=limit)
    assert re.search(words, mask.encode(update, broadcast, SEEDS).failure)


def test_the_server_checks_the_sum() -> None:
    """A client that lies can't be named: all that are in the sum are."""
    federation = federation_for(secure_aggregation=True)
    model, seeds = federation.problem.initial_model(), federation.problem.seeds
    broadcast = invite(federation.config, seeds, Broadcast(1, model), CLIENTS[:3], 0)
    size = sum(tensor.numel() for tensor in model.values()) + 2
    wild = [Update(c, {MASKED: torch.full((size,), 2**61)}, 1, 1, 0.0, 0.0) for c in CLIENTS[:3]]
    outcome = server_update(federation.server_side, broadcast, {}, wild)
    assert outcome.accepted == []
    assert [each["client"] for each in outcome.rejected] == [2, 5, 6]


@pytest.mark.parametrize("changes", [{}, {"weighting": "examples"}, {"method": "scaffold", "optimizer": "sgd"}])
def test_a_run_is_that_without_masks_up_to_rounding(tmp_path: Path, changes: dict[str, Any]) -> None:
    plain = run_tiny(tmp_path / "plain", rounds=2, **changes)
    secure = run_tiny(tmp_path / "secure", rounds=2, secure_aggregation=True, **changes)
    for name, tensor in plain.state.model.items():
        torch.testing.assert_close(secure.state.model[name], tensor, rtol=0, atol=1e-5)
    assert secure.history[0]["clients"] == plain.history[0]["clients"]
    assert secure.history[0]["train_loss"] == pytest.approx(plain.history[0]["train_loss"], abs=4 / SCALE)
    assert 2 * plain.summary["bytes_up"] < secure.summary["bytes_up"] < 4 * plain.summary["bytes_up"]


def stop_after_two(run: RunContext, record: Record) -> None:
    if record["round"] == 2:
        run.stop("enough")


def test_dropouts_are_recovered_with_the_same_bits_everywhere(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"secure_aggregation": True, "dropout": 0.3, "rounds": 4, "seed": 1}
    once = run_tiny(tmp_path / "once", **changes)
    two = run_tiny(tmp_path / "two", **changes, workers=2)
    dynafed.run(tiny(**changes), train=TRAIN, test=TEST, out=tmp_path / "resumed", callbacks=[stop_after_two])
    resumed = dynafed.resume(tmp_path / "resumed", train=TRAIN, test=TEST)
    assert tree.digest(once.state.model) == tree.digest(two.state.model) == tree.digest(resumed.state.model)
    assert any(record.get("secagg_recovered") for record in once.history)
    for record in once.history:
        assert record.get("skipped") or len(record["clients"]) >= 3
        assert record["repeats"] or record["secagg_recovered"] == 4 - len(record["clients"])
    skipping = run_tiny(tmp_path / "skip", **changes | {"dropout": 0.8, "failed_round": "skip", "max_failed_rounds": 0})
    assert any(record.get("skipped") for record in skipping.history)


def test_with_central_noise_it_is_the_same_release(tmp_path: Path) -> None:
    """The noise is drawn from the same key; only the fixed point differs."""
    plain = run_tiny(tmp_path / "plain", rounds=2, dp__noise=1.0)
    secure = run_tiny(tmp_path / "secure", rounds=2, dp__noise=1.0, secure_aggregation=True)
    for name, tensor in plain.state.model.items():
        torch.testing.assert_close(secure.state.model[name], tensor, rtol=0, atol=1e-4)
    assert secure.summary["epsilon"] == plain.summary["epsilon"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "median"}, "median needs each client's model"),
        ({"method": "geometric-median"}, "geometric-median needs each client's model"),
        ({"method": "fedgen"}, "fedgen needs each client's model"),
        ({"method": "feddf", "server_samples": 40}, "feddf needs each client's model"),
        ({"method": "fednova"}, "fednova combines the updates one by one"),
        ({"method": "fedmix"}, "fedmix's clients send something before round 1"),
        ({"update_transforms": ["top-k"]}, "top-k must be decoded for each client"),
        ({"dp.noise": 1.0, "dp.clipping": "adaptive"}, "looks at each client's update"),
        ({"watch": [1]}, "follows single clients"),
        ({"clients_per_round": 1}, "needs 2 clients a round"),
    ],
)
def test_what_needs_more_than_a_sum_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny(secure_aggregation=True, **changes)


def test_flower_refuses(tmp_path: Path) -> None:
    config = tiny(secure_aggregation=True, engine="flower")
    with pytest.raises(UserError, match=r"SecAgg[+] of its own"):
        dynafed.run(config, train=TRAIN, test=TEST, out=tmp_path / "r", backend=backend_on_nodes)

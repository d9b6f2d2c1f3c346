"""Client halves that work together: corrections chain, each with its own state; what has no meaning is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import assert_moved, federation_for, gradient, leaves, noise_like
from contract.cases import everything
from problems import TEST, TRAIN, client_data, tiny

import dynafed
from dynafed import UserError, tree
from dynafed.engine.local import local_update
from dynafed.messages import Broadcast


def test_the_second_step_has_both_corrections() -> None:
    """Two steps of SGD at 1/2: SCAFFOLD shifts both by c - c_i, FedProx pulls the second back by mu (w_1 - w_0)."""
    settings: dict[str, Any] = {"fedprox__mu": 0.8, "local_steps": 2}
    federation = federation_for("fedprox+scaffold", **settings)
    start = federation.problem.initial_model()
    c, own = noise_like(start, 1), noise_like(start, 2)
    state = tree.nest({"method": tree.nest({"scaffold": own})})
    update, kept = local_update(
        federation.client_side, federation.client(3), Broadcast(2, start, {"scaffold": c}), state
    )
    x, y = client_data(federation, 3)
    shift = {name: c[name] - own[name] for name in start}
    params = leaves(start)
    grads = gradient(torch.nn.functional.cross_entropy(federation.problem.forward(params, x), y), params)
    first = {name: start[name] - 0.5 * (grads[name] + shift[name]) for name in start}
    params = leaves(first)
    again = gradient(torch.nn.functional.cross_entropy(federation.problem.forward(params, x), y), params)
    assert_moved(
        update.model,
        first,
        {name: -0.5 * (again[name] + shift[name] + 0.8 * (first[name] - start[name])) for name in start},
    )
    # Only SCAFFOLD keeps something: by option I, the gradient at the global model.
    states = tree.unnest(tree.unnest(kept)["method"])
    assert states.keys() == {"scaffold"}
    for name, grad in grads.items():
        torch.testing.assert_close(states["scaffold"][name], grad, rtol=1e-4, atol=1e-6)


def test_a_chain_of_one_is_that_one(tmp_path: Path) -> None:
    runs = [
        dynafed.run(tiny(rounds=3, method=method, **{"fedprox.mu": 0}), train=TRAIN, test=TEST, out=tmp_path / method)
        for method in ("scaffold", "fedprox+scaffold")
    ]
    assert tree.digest(runs[0].state.model) == tree.digest(runs[1].state.model)


CHAINS = ["fedprox+scaffold", "fedprox+moon", "moon+feddyn", "scaffold+fedmix", "fedgen+fedprox"]


@pytest.mark.parametrize("method", CHAINS)
def test_chains_resume_and_share_work_with_the_same_bits(tmp_path: Path, method: str) -> None:
    config = tiny(method=method, rounds=4, optimizer="sgd", lr=0.1, client_state="persistent")
    parts: dict[str, Any] = {"train": TRAIN, "test": TEST}
    whole = dynafed.run(config, out=tmp_path / "whole", **parts)
    dynafed.run(config.replace(rounds=2, workers=2), out=tmp_path / "half", **parts)
    resumed = dynafed.resume(tmp_path / "half", changes={"rounds": 4}, **parts)
    assert everything(resumed.state) == everything(whole.state)
    plain = dynafed.run(config.replace(method="fedavg"), out=tmp_path / "plain", **parts)
    assert tree.digest(plain.state.model) != tree.digest(whole.state.model)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"method": "moon+fedmix"}, "moon and fedmix both have a loss of their own"),
        ({"method": "feddyn+fedprox"}, "feddyn's state is wrong where fedprox corrects the gradient"),
        ({"method": "scaffold+feddyn"}, "feddyn's state is wrong where scaffold"),
        ({"method": "scaffold+moon"}, "option = 'I' takes the gradient of the plain loss, not moon's"),
        (
            {"method": "fedprox+scaffold", "optimizer": "sgd", "scaffold.option": "II"},
            "option = 'II' would take fedprox's correction",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny(**values)

"""FedMix's averages, its pool and its Taylor term."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_moved, federation_for, gradient, leaves, trained
from problems import TEST, TRAIN, client_data, tiny

import dynafed
from dynafed import UserError, tree
from dynafed.engine import checkpoint
from dynafed.engine.backend import setup_clients
from dynafed.engine.checkpoint import RunState
from dynafed.engine.federation import Federation
from dynafed.engine.processes import ProcessBackend
from dynafed.engine.server import server_setup
from dynafed.methods import ServerContext
from dynafed.tree import Tree


def pooled(federation: Federation) -> Tree:
    server, _ = server_setup(federation.server_side, {"fedmix": {}}, setup_clients(federation))
    return server["fedmix"]


def test_averages_hold_at_least_so_many_samples_and_all_of_them_once() -> None:
    federation = federation_for("fedmix", fedmix__samples=7)
    x, y = client_data(federation, 2)
    sent = federation.methods.clients[0].setup_client(federation.client(2))
    assert len(sent["x"]) == len(sent["y"]) == len(y) // 7
    torch.testing.assert_close(sent["y"].sum(1), torch.ones(len(sent["y"])))
    # Groups differ by at most one sample, so the mean of means is nearly the mean.
    assert (sent["x"].mean(0) - x.mean(0)).abs().max() < 0.2
    rows = np.split(federation.problem.seeds.rng("fedmix", 2).permutation(len(y)), [8])[0] if len(y) % 7 else None
    if rows is not None:
        torch.testing.assert_close(sent["x"][0], x[rows].mean(0))


def test_a_client_with_too_few_samples_sends_nothing_and_the_seed_matters() -> None:
    lists = [range(0, 3), range(3, 100)]
    plans = [
        Federation.create(tiny(method="fedmix", seed=seed), train=TRAIN, test=TEST, clients=lists) for seed in (0, 1)
    ]
    alone, others = (plans[0].methods.clients[0].setup_client(plans[0].client(client)) for client in (0, 1))
    assert len(alone["x"]) == 0
    assert len(others["x"]) == 97 // 5
    other_seed = plans[1].methods.clients[0].setup_client(plans[1].client(1))
    assert not torch.equal(others["x"], other_seed["x"])
    greedy = Federation.create(tiny(method="fedmix", fedmix__samples=98), train=TRAIN, test=TEST, clients=lists)
    with pytest.raises(UserError, match=r"no client has the fedmix.samples = 98"):
        pooled(greedy)


def test_each_round_draws_other_averages_from_the_pool() -> None:
    federation = federation_for("fedmix", fedmix__sent=9)
    method, state = federation.methods.clients[0], pooled(federation)
    assert len(state["y"]) == sum(size // 5 for size in federation.data.partition.sizes)
    first = method.broadcast(state)
    assert len(first["x"]) == len(first["y"]) == 9
    assert len(set(state["rows"].tolist())) == 9
    server = ServerContext(federation.problem, 1, {})
    then = method.server_step({}, state, server).state
    assert not torch.equal(then["rows"], state["rows"])
    whole = federation_for("fedmix", fedmix__sent=0)
    assert len(whole.methods.clients[0].broadcast(pooled(whole))["x"]) == len(state["y"])


def test_an_enrolment_with_infinities_is_left_out() -> None:
    federation = federation_for("fedmix")
    sent = list(setup_clients(federation))
    bad = {"x": sent[0]["x"] * torch.inf, "y": sent[0]["y"]}
    server, counts = server_setup(federation.server_side, {}, [bad, *sent[1:]])
    assert counts == {"bytes_enrolment": sum(map(tree.nbytes, sent)), "enrolments_rejected": 1}
    assert torch.equal(server["fedmix"]["x"], torch.cat([each["x"] for each in sent[1:]]))


def test_a_run_that_stopped_in_round_1_enrols_again(tmp_path: Path) -> None:
    config = tiny(method="fedmix", rounds=2, fedmix__sent=9)
    whole = dynafed.run(config, train=TRAIN, test=TEST, out=tmp_path / "whole")
    federation, cut = whole.federation, tmp_path / "cut"
    checkpoint.save(cut, federation, RunState.initial(federation, ProcessBackend(federation), cut))
    (cut / "config.toml").write_text(federation.config.to_toml())
    again = dynafed.resume(cut, train=TRAIN, test=TEST)
    assert again.history[0]["bytes_enrolment"] == whole.history[0]["bytes_enrolment"] > 0
    assert whole.summary["bytes_up"] == sum(r["bytes_up"] for r in whole.history) + whole.history[0]["bytes_enrolment"]
    assert tree.digest(again.state.model) == tree.digest(whole.state.model)
    assert tree.digest(tree.nest(again.state.server)) == tree.digest(tree.nest(whole.state.server))


@pytest.mark.parametrize("mix", ["taylor", "naive"])
def test_the_first_step_is_the_gradient_of_the_formula(mix: str) -> None:
    lam = 0.3
    federation = federation_for("fedmix", fedmix__ratio=lam, fedmix__sent=1, fedmix__mix=mix)
    extras = federation.methods.clients[0].broadcast(pooled(federation))
    x, y = client_data(federation, 3)
    x_mean, y_mean = extras["x"][0], extras["y"][0]
    params = leaves(federation.problem.initial_model())

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(federation.problem.forward(params, inputs), labels)

    every_mean = y_mean.repeat(len(y), 1)
    if mix == "naive":
        mixed = (1 - lam) * x + lam * x_mean
        total = (1 - lam) * loss(mixed, y) + lam * loss(mixed, every_mean)
    else:
        shrunk = ((1 - lam) * x).requires_grad_()
        slope = torch.func.grad(lambda inputs: loss(inputs, y))(shrunk)
        total = (1 - lam) * loss(shrunk, y) + lam * loss(shrunk, every_mean) + lam * (slope * x_mean).sum()
    update, _ = trained(federation, extras)
    assert update.loss == pytest.approx(total.item(), rel=1e-5)
    start = federation.problem.initial_model()
    assert_moved(update.model, start, {name: -0.5 * grad for name, grad in gradient(total, params).items()})


def test_the_taylor_term_against_finite_differences() -> None:
    """In double precision: loss(s + e * x') is loss(s) + e * term, to first order."""
    federation = federation_for("fedmix", fedmix__ratio=0.1, fedmix__sent=1)
    extras = federation.methods.clients[0].broadcast(pooled(federation))
    x, y = client_data(federation, 3)
    weights = {name: tensor.double() for name, tensor in federation.problem.initial_model().items()}
    shrunk, x_mean = 0.9 * x.double(), extras["x"][0].double()
    module = federation.problem.model.double()
    try:
        up, middle, down = (
            F.cross_entropy(torch.func.functional_call(module, weights, (shrunk + step * x_mean,)), y)
            for step in (1e-5, 0.0, -1e-5)
        )
        logits = torch.func.functional_call(module, weights, (shrunk,))
        other = F.cross_entropy(logits, extras["y"][0].double().expand_as(logits))
    finally:
        module.float()
    term = (up - down) / 2e-5
    update, _ = trained(federation, extras)
    assert abs(float(term)) > 1e-3
    assert update.loss == pytest.approx(float(0.9 * middle + 0.1 * other + 0.1 * term), rel=1e-5)

"""FedGen's generator and what clients make of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_moved, federation_for, gradient, leaves, sent, trained
from problems import client_data
from torch import Tensor

from dynafed import optim, tree
from dynafed.engine.federation import Federation
from dynafed.engine.local import local_update
from dynafed.generator import cumulative, draw_inputs, generate, generator_loss
from dynafed.methods import ServerContext
from dynafed.tree import Tree

SETTINGS: dict[str, Any] = {"fedgen__noise": 4, "fedgen__hidden": 16, "fedgen__lr": 3e-3}


def state_of(federation: Federation) -> Tree:
    return federation.methods.clients[0].init_server(federation.problem, federation.problem.initial_model())


def one_server_round(federation: Federation, state: Tree, round_num: int = 1) -> tuple[Tree, ServerContext, Any]:
    method = federation.methods.clients[0]
    updates = [
        local_update(federation.client_side, federation.client(client), sent(federation, method.broadcast(state)))[0]
        for client in range(8)
    ]
    model = federation.problem.initial_model()
    server = ServerContext(
        federation.problem,
        round_num,
        model,
        federation.server_side.data,
        average=model,
        participants=8,
        updates=updates,
    )
    refined = method.server_step(model, state, server)
    assert refined.model is model
    return refined.state, server, refined


def test_the_generator_s_loss_falls_and_its_samples_are_classified_as_their_labels() -> None:
    federation = federation_for("fedgen", fedgen__steps=60, local_steps=60, lr=0.1, alpha=100.0, **SETTINGS)
    state, losses = state_of(federation), []
    for round_num in range(1, 6):
        state, server, refined = one_server_round(federation, state, round_num)
        losses.append(refined.metrics["generator_loss"])
    assert losses[-1] < 0.5 * losses[0]
    labels = torch.arange(4).repeat(50)
    noise = torch.from_numpy(np.random.default_rng(3).standard_normal((200, 4))).float()
    features = generate(tree.unnest(state)["net"], noise, labels)
    votes = torch.stack([federation.problem.head(update.model, features) for update in server.updates]).mean(0)
    assert (votes.argmax(1) == labels).float().mean() > 0.95
    assert int(tree.unnest(state)["seen"]["rounds"]) == 5


def test_clients_send_their_label_counts_and_the_server_s_labels_follow() -> None:
    federation = federation_for("fedgen", fedgen__steps=1, **SETTINGS)
    state, server, _ = one_server_round(federation, state_of(federation))
    counts = federation.data.partition.class_counts(federation.data.dataset.train_y, 4)
    for update in server.updates:
        assert update.extras["fedgen"]["counts"].tolist() == counts[update.client].tolist()
    labels = tree.unnest(state)["seen"]["labels"]
    torch.testing.assert_close(labels, torch.from_numpy(counts.sum(0) / counts.sum()).float())


@pytest.mark.parametrize("count", [-(10**15), 0])
def test_label_counts_that_make_no_sense_don_t_end_the_run(count: int) -> None:
    federation = federation_for("fedgen", fedgen__steps=1, **SETTINGS)
    state = state_of(federation)
    _, server, _ = one_server_round(federation, state)
    lies = {"fedgen": {"counts": torch.full((4,), count)}}
    updates = [dataclasses.replace(update, extras=lies) for update in server.updates]
    for told in (updates, [*updates[:1], *server.updates[1:]]):
        refined = federation.methods.clients[0].server_step(
            server.average, state, dataclasses.replace(server, updates=told)
        )
        assert all(torch.isfinite(tensor).all() for tensor in refined.state.values())
        assert (refined.state["seen/labels"] >= 0).all()


def test_heads_are_trusted_by_their_label_counts_and_alike_features_cost() -> None:
    """Two heads: one knows label 0 alone, the other label 1 alone; a head's loss on what it never saw is ignored."""
    federation = federation_for("fedgen", **SETTINGS)
    net = tree.unnest(state_of(federation))["net"]
    weights = torch.stack(
        [federation.problem.initial_model()["head.weight"], -federation.problem.initial_model()["head.weight"]]
    )
    trust = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]])
    noise, labels = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 0, 1, 1, 1])
    features = generate(net, noise, labels)
    by_hand = torch.cat([F.linear(features[:3], weights[0]), F.linear(features[3:], weights[1])])
    wrong = F.cross_entropy(by_hand, labels)

    def heads(features: Tensor) -> Tensor:
        return torch.stack([F.linear(features, weight) for weight in weights])

    torch.testing.assert_close(generator_loss(net, heads, trust, noise, labels, 0.0), wrong)
    apart = torch.zeros(())
    for i in range(6):
        for j in range(6):
            apart += (features[i] - features[j]).abs().mean() * (noise[i] - noise[j]).square().mean() / 36
    torch.testing.assert_close(generator_loss(net, heads, trust, noise, labels, 2.0), wrong + 2 * torch.exp(-apart))


def test_round_1_is_fedavg_and_later_steps_move_by_both_terms() -> None:
    federation = federation_for("fedgen", fedgen__alpha=3.0, fedgen__beta=2.0, fedgen__decay=0.5, **SETTINGS)
    plain, _ = trained(federation_for())
    state = state_of(federation)
    first, _ = trained(federation, federation.methods.clients[0].broadcast(state))
    assert tree.digest(first.model) == tree.digest(plain.model)
    state["seen/rounds"] += 1
    moved, _ = trained(federation, federation.methods.clients[0].broadcast(state))
    # The same stream of random numbers that the client has: labels, then noise.
    rng = federation.problem.seeds.rng("method", 2, 3)
    x, y = client_data(federation, 3)
    (rows,) = next(optim.batches([torch.arange(len(y))], 1000, 1, federation.problem.seeds.rng("batches", 2, 3)))
    x, y = x[rows], y[rows]
    labels = torch.cat([y, torch.from_numpy(rng.choice(4, 32, p=[0.25] * 4))])
    features = generate(
        tree.unnest(state)["net"], torch.from_numpy(rng.standard_normal((len(labels), 4))).float(), labels
    )
    params = leaves(federation.problem.initial_model())
    logits, generated = federation.problem.forward(params, x), federation.problem.head(params, features)
    target = generated[: len(y)].detach().softmax(1)
    agreement = (target * (target.log() - logits.log_softmax(1))).sum(1).mean()
    taught = F.cross_entropy(generated[len(y) :], labels[len(y) :])
    grads = gradient(0.5 * (3.0 * taught + 2.0 * agreement), params)
    assert_moved(moved.model, plain.model, {name: -0.5 * grad for name, grad in grads.items()}, rtol=1e-3)


def test_the_generator_depends_on_the_seed_and_its_moments_are_kept() -> None:
    plans = [federation_for("fedgen", seed=seed, **SETTINGS) for seed in (0, 1)]
    assert not torch.equal(state_of(plans[0])["net/0.weight"], state_of(plans[1])["net/0.weight"])
    state, _, _ = one_server_round(plans[0], state_of(plans[0]))
    assert any(name.startswith("adam/") for name in state)
    assert not any(name.startswith("adam/") for name in plans[0].methods.clients[0].broadcast(state))


@pytest.mark.parametrize("size", [1, 2])
def test_a_client_of_one_sample_can_train(size: int) -> None:
    federation = federation_for("fedgen", batch_size=size, **SETTINGS)
    state = state_of(federation)
    state["seen/rounds"] += 1
    update, _ = trained(federation, federation.methods.clients[0].broadcast(state))
    assert np.isfinite(update.loss)


def test_labels_and_noise_are_those_of_numpy_s_choice() -> None:
    shares = torch.tensor([0.1, 0.0, 0.25, 0.3, 1e-6, 0.05])
    exact = shares.double() / shares.double().sum()
    ours, theirs = (np.random.default_rng(5) for _ in range(2))
    for _ in range(3):
        labels, noise = draw_inputs(cumulative(shares), 100, 4, ours, torch.device("cpu"), more=3)
        assert labels.tolist() == theirs.choice(len(shares), 100, p=exact.numpy()).tolist()
        assert torch.equal(noise, torch.from_numpy(theirs.standard_normal((103, 4))).float())

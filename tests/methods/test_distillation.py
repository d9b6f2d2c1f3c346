"""ABAVG, FedDF and FedBE: what the server does with its own data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import federation_for, round_context, sent

from dynafed import problem as problem_module
from dynafed import tree
from dynafed.distillation import distill
from dynafed.engine.federation import Federation
from dynafed.engine.local import local_update
from dynafed.messages import Update
from dynafed.methods import Mean, ServerContext, ServerOutput
from dynafed.methods.abavg import ByAccuracy
from dynafed.tree import Tree

MANY: dict[str, Any] = {"server_samples": 80, "local_steps": 30, "lr": 0.1}


def seen(federation: Federation, clients: int = 4) -> ServerContext:
    """A round's updates as the server half sees them."""
    updates = [
        local_update(federation.client_side, federation.client(client), sent(federation))[0]
        for client in range(clients)
    ]
    mean = Mean("uniform")
    for update in updates:
        mean.add(update)
    return ServerContext(
        federation.problem,
        1,
        federation.problem.initial_model(),
        federation.server_side.data,
        average=mean.mean(),
        participants=clients,
        updates=updates,
    )


def refined(federation: Federation, server: ServerContext) -> ServerOutput:
    return federation.methods.steps[0].server_step(server.average, {}, server)


def ensemble_gap(federation: Federation, model: Tree, server: ServerContext) -> float:
    """KL from the clients' mean logits to a model, on the server's data."""
    x, _ = federation.server_side.data
    target = torch.stack([federation.problem.predict(update.model, x) for update in server.updates]).mean(0).softmax(1)
    return float(F.kl_div(federation.problem.predict(model, x).log_softmax(1), target, reduction="batchmean"))


def test_abavg_weighs_by_accuracy_on_the_whole_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the batches are: with ragged ones, the last of which would tell another story."""
    monkeypatch.setattr(problem_module, "BATCH", 7)
    federation = federation_for("abavg", **MANY)
    updates = seen(federation).updates
    x, y = federation.server_side.data
    right = [np.mean((federation.problem.forward(u.model, x).argmax(1) == y).numpy()) for u in updates]
    last = [np.mean((federation.problem.forward(u.model, x[77:]).argmax(1) == y[77:]).numpy()) for u in updates]
    assert not np.allclose(np.divide(right, np.sum(right)), np.divide(last, max(np.sum(last), 1e-9)), atol=0.02)
    combiner = federation.methods.combiner(round_context(federation))
    for update in updates:
        combiner.add(update)
    for name, tensor in combiner.result().model.items():
        expected = sum(share * u.model[name].double() for share, u in zip(right, updates, strict=True)) / sum(right)
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-7)


def test_abavg_of_clients_who_are_all_wrong_is_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = federation_for("abavg", **MANY)
    monkeypatch.setattr(ByAccuracy, "accuracy", lambda self, model: 0.0)
    combiner = federation.methods.combiner(round_context(federation))
    for client, value in enumerate((1.0, 3.0)):
        combiner.add(Update(client, {"w": torch.tensor([value])}, 1, 1, 0.0, 0.0))
    assert combiner.result().model["w"] == 2.0


def test_feddf_brings_the_average_nearer_to_the_ensemble() -> None:
    federation = federation_for("feddf", feddf__steps=200, feddf__lr=0.01, **MANY)
    server = seen(federation)
    taught = refined(federation, server)
    assert ensemble_gap(federation, taught.model, server) < 0.2 * ensemble_gap(federation, server.average, server)
    assert taught.metrics == {"distillation_steps": 200}
    assert tree.digest(refined(federation, server).model) == tree.digest(taught.model)


def test_feddf_stops_when_the_student_agrees_no_more_often() -> None:
    federation = federation_for("feddf", feddf__steps=5000, feddf__patience=100, **MANY)
    assert refined(federation, seen(federation)).metrics["distillation_steps"] < 5000


def test_feddf_keeps_the_best_student_by_labels_if_it_may_see_them() -> None:
    federation = federation_for("feddf", feddf__steps=60, feddf__lr=0.01, feddf__validate=True, **MANY)
    x, y = federation.server_side.data

    def right(model: Tree) -> int:
        return int((federation.problem.predict(model, x).argmax(1) == y).sum())

    server = seen(federation)
    taught = refined(federation, server)
    assert right(taught.model) >= right(server.average)
    # An ensemble that says the opposite of the truth teaches nothing: the average stays, bit for bit.
    wrong = {name: -tensor for name, tensor in server.average.items() if name.startswith("head.")}
    liar = replace(server.updates[0], model=server.average | wrong)
    misled = refined(federation, replace(server, updates=[liar]))
    assert misled.metrics == {"distillation_steps": 0}
    assert tree.digest(misled.model) == tree.digest(server.average)


def test_the_first_distillation_step_is_the_gradient_of_kl_to_the_mean_logits() -> None:
    federation = federation_for("feddf", **MANY)
    server = seen(federation)
    x, _ = federation.server_side.data
    target = torch.stack([federation.problem.predict(update.model, x) for update in server.updates]).mean(0).softmax(1)
    _, student = next(
        distill("feddf", server.average, target, server, optimizer="sgd", batch_size=80, steps=1, rate=lambda step: 0.5)
    )
    params = {name: tensor.clone().requires_grad_() for name, tensor in server.average.items()}
    logits = federation.problem.forward(params, x)
    loss = (target * (target.log() - logits.log_softmax(1))).sum(1).mean()
    for (name, before), grad in zip(
        server.average.items(), torch.autograd.grad(loss, list(params.values())), strict=True
    ):
        torch.testing.assert_close(student[name].detach(), before - 0.5 * grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
def test_fedbe_s_teachers(distribution: str) -> None:
    federation = federation_for("fedbe", fedbe__samples=400, fedbe__distribution=distribution, **MANY)
    server = seen(federation)
    method: Any = federation.methods.steps[0]
    teachers = list(method.teachers(server))
    assert len(teachers) == 4 + 1 + 400
    assert teachers[4] is server.average
    clients = torch.stack([update.model["head.bias"] for update in server.updates])
    samples = torch.stack([teacher["head.bias"] for teacher in teachers[5:]])
    spread = clients.std(0, correction=0)
    torch.testing.assert_close(samples.mean(0), clients.mean(0), rtol=0, atol=0.25 * float(spread.max()))
    if distribution == "gaussian":
        torch.testing.assert_close(samples.std(0), spread, rtol=0.15, atol=0)
        assert (samples.max(0).values > clients.max(0).values).any()
    else:
        # Dirichlet(1, 1, 1, 1) weights have variance 3/80 and covariance -1/80: a fifth of the clients' variance.
        torch.testing.assert_close(samples.std(0), spread * 0.2**0.5, rtol=0.15, atol=0)
        assert (samples <= clients.max(0).values + 1e-6).all()
    other = federation_for("fedbe", seed=1, fedbe__samples=1, fedbe__distribution=distribution, **MANY)
    elsewhere: Any = other.methods.steps[0]
    drawn = list(elsewhere.teachers(replace(server, problem=other.problem)))[5]
    assert not torch.equal(drawn["head.bias"], samples[0])


def test_fedbe_s_student_is_the_mean_of_the_cycles_ends() -> None:
    federation = federation_for(
        "fedbe", fedbe__epochs=6, fedbe__batch_size=20, fedbe__cycle=5, fedbe__swa_start=9, fedbe__lr=0.5, **MANY
    )
    server = seen(federation)
    method: Any = federation.methods.steps[0]
    x, _ = federation.server_side.data
    teachers = [federation.problem.predict(teacher, x).softmax(1) for teacher in method.teachers(server)]
    snapshots = []
    for done, student in distill(
        "fedbe",
        server.average,
        torch.stack(teachers).mean(0),
        server,
        optimizer="momentum",
        batch_size=20,
        steps=24,
        rate=method.rate,
    ):
        if done in (10, 15, 20, 24):
            snapshots.append(tree.clone_contiguous(student))
    averaged = refined(federation, server).model
    for name, tensor in averaged.items():
        torch.testing.assert_close(tensor, torch.stack([s[name] for s in snapshots]).mean(0))
    assert not torch.equal(averaged["head.bias"], snapshots[-1]["head.bias"])


def test_fedbe_s_rate_is_a_saw() -> None:
    method: Any = federation_for("fedbe", fedbe__cycle=4, fedbe__lr=1.0, fedbe__lr_end=0.4, **MANY).methods.steps[0]
    assert [method.rate(step) for step in range(5)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 1.0])

"""ABAVG, FedDF and FedBE: what the server does with its own data."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import plan_for, sent

from dynafed import tree
from dynafed.distillation import distil
from dynafed.engine import plan as plan_module
from dynafed.engine.local import local_update
from dynafed.engine.plan import Plan
from dynafed.messages import Update
from dynafed.methods import Mean, Refined, Server
from dynafed.methods.abavg import ByAccuracy
from dynafed.tree import Tree

MANY: dict[str, Any] = {"server_samples": 80, "local_steps": 30, "lr": 0.1}


def seen(plan: Plan, clients: int = 4) -> Server:
    """A round's updates as the server half sees them."""
    updates = [local_update(plan, sent(plan), client)[0] for client in range(clients)]
    mean = Mean("uniform")
    for update in updates:
        mean.add(update)
    return Server(plan, 1, plan.initial_model(), mean.result(), {}, clients, updates)


def refined(plan: Plan, server: Server) -> Refined:
    return plan.methods.steps[0].refine(server.combined, {}, server)


def ensemble_gap(plan: Plan, model: Tree, server: Server) -> float:
    """KL from the clients' mean logits to a model, on the server's data."""
    x, _ = plan.server_data()
    target = torch.stack([plan.predict(update.model, x) for update in server.updates]).mean(0).softmax(1)
    return float(F.kl_div(plan.predict(model, x).log_softmax(1), target, reduction="batchmean"))


def test_abavg_weighs_by_accuracy_on_the_whole_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the batches are: with ragged ones, the last of which would tell another story."""
    monkeypatch.setattr(plan_module, "CHUNK", 7)
    plan = plan_for("abavg", **MANY)
    updates = seen(plan).updates
    x, y = plan.server_data()
    right = [np.mean((plan.forward(u.model, x).argmax(1) == y).numpy()) for u in updates]
    last = [np.mean((plan.forward(u.model, x[77:]).argmax(1) == y[77:]).numpy()) for u in updates]
    assert not np.allclose(np.divide(right, np.sum(right)), np.divide(last, max(np.sum(last), 1e-9)), atol=0.02)
    combiner = plan.methods.combiner(plan)
    for update in updates:
        combiner.add(update)
    for name, tensor in combiner.result().items():
        expected = sum(share * u.model[name].double() for share, u in zip(right, updates, strict=True)) / sum(right)
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-7)


def test_abavg_of_clients_who_are_all_wrong_is_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for("abavg", **MANY)
    monkeypatch.setattr(ByAccuracy, "accuracy", lambda self, model: 0.0)
    combiner = plan.methods.combiner(plan)
    for client, value in enumerate((1.0, 3.0)):
        combiner.add(Update(client, {"w": torch.tensor([value])}, 1, 1, 0.0, 0.0))
    assert combiner.result()["w"] == 2.0


def test_feddf_brings_the_average_nearer_to_the_ensemble() -> None:
    plan = plan_for("feddf", feddf__steps=200, feddf__lr=0.01, **MANY)
    server = seen(plan)
    taught = refined(plan, server)
    assert ensemble_gap(plan, taught.model, server) < 0.2 * ensemble_gap(plan, server.combined, server)
    assert taught.metrics == {"distillation_steps": 200}
    assert tree.digest(refined(plan, server).model) == tree.digest(taught.model)


def test_feddf_stops_when_the_student_agrees_no_more_often() -> None:
    plan = plan_for("feddf", feddf__steps=5000, feddf__patience=100, **MANY)
    assert refined(plan, seen(plan)).metrics["distillation_steps"] < 5000


def test_feddf_keeps_the_best_student_by_labels_if_it_may_see_them() -> None:
    plan = plan_for("feddf", feddf__steps=60, feddf__lr=0.01, feddf__validate=True, **MANY)
    x, y = plan.server_data()

    def right(model: Tree) -> int:
        return int((plan.predict(model, x).argmax(1) == y).sum())

    server = seen(plan)
    taught = refined(plan, server)
    assert right(taught.model) >= right(server.combined)
    # An ensemble that says the opposite of the truth teaches nothing: the average stays, bit for bit.
    wrong = {name: -tensor for name, tensor in server.combined.items() if name.startswith("head.")}
    liar = dataclasses.replace(server.updates[0], model=server.combined | wrong)
    misled = refined(plan, dataclasses.replace(server, updates=[liar]))
    assert misled.metrics == {"distillation_steps": 0}
    assert tree.digest(misled.model) == tree.digest(server.combined)


def test_the_first_distillation_step_is_the_gradient_of_kl_to_the_mean_logits() -> None:
    plan = plan_for("feddf", **MANY)
    server = seen(plan)
    x, _ = plan.server_data()
    target = torch.stack([plan.predict(update.model, x) for update in server.updates]).mean(0).softmax(1)
    _, student = next(
        distil("feddf", server.combined, target, server, optimizer="sgd", batch_size=80, steps=1, rate=lambda step: 0.5)
    )
    params = {name: tensor.clone().requires_grad_() for name, tensor in server.combined.items()}
    logits = plan.forward(params, x)
    loss = (target * (target.log() - logits.log_softmax(1))).sum(1).mean()
    for (name, before), grad in zip(
        server.combined.items(), torch.autograd.grad(loss, list(params.values())), strict=True
    ):
        torch.testing.assert_close(student[name].detach(), before - 0.5 * grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
def test_fedbe_s_teachers(distribution: str) -> None:
    plan = plan_for("fedbe", fedbe__samples=400, fedbe__distribution=distribution, **MANY)
    server = seen(plan)
    method: Any = plan.methods.steps[0]
    teachers = list(method.teachers(server))
    assert len(teachers) == 4 + 1 + 400
    assert teachers[4] is server.combined
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
    other = plan_for("fedbe", seed=1, fedbe__samples=1, fedbe__distribution=distribution, **MANY)
    elsewhere: Any = other.methods.steps[0]
    drawn = list(elsewhere.teachers(Server(other, 1, {}, server.combined, {}, 4, server.updates)))[5]
    assert not torch.equal(drawn["head.bias"], samples[0])


def test_fedbe_s_student_is_the_mean_of_the_cycles_ends() -> None:
    plan = plan_for(
        "fedbe", fedbe__epochs=6, fedbe__batch_size=20, fedbe__cycle=5, fedbe__swa_start=9, fedbe__lr=0.5, **MANY
    )
    server = seen(plan)
    method: Any = plan.methods.steps[0]
    x, _ = plan.server_data()
    teachers = [plan.predict(teacher, x).softmax(1) for teacher in method.teachers(server)]
    snapshots = []
    for done, student in distil(
        "fedbe",
        server.combined,
        torch.stack(teachers).mean(0),
        server,
        optimizer="momentum",
        batch_size=20,
        steps=24,
        rate=method.rate,
    ):
        if done in (10, 15, 20, 24):
            snapshots.append(tree.clone(student))
    averaged = refined(plan, server).model
    for name, tensor in averaged.items():
        torch.testing.assert_close(tensor, torch.stack([s[name] for s in snapshots]).mean(0))
    assert not torch.equal(averaged["head.bias"], snapshots[-1]["head.bias"])


def test_fedbe_s_rate_is_a_saw() -> None:
    method: Any = plan_for("fedbe", fedbe__cycle=4, fedbe__lr=1.0, fedbe__lr_end=0.4, **MANY).methods.steps[0]
    assert [method.rate(step) for step in range(5)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 1.0])

"""The client loop against arithmetic done by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import TEST, TRAIN, client_data, tiny
from torch import nn

from dynafed import tree
from dynafed.engine.federation import Federation
from dynafed.engine.local import local_update
from dynafed.messages import Broadcast
from dynafed.optim import batches


def federation_for(**changes: Any) -> Federation:
    return Federation.create(tiny(**changes), train=TRAIN, test=TEST)


def broadcast(federation: Federation, round_num: int = 1) -> Broadcast:
    return Broadcast(round_num, federation.problem.initial_model())


def test_batches_cover_every_sample_each_epoch() -> None:
    pairs = list(batches((torch.arange(10), 2 * torch.arange(10)), 4, 6, np.random.default_rng(0)))
    assert all(torch.equal(2 * a, b) for a, b in pairs)
    rows = [batch.numpy() for batch, _ in pairs]
    assert [len(batch) for batch in rows] == [4, 4, 2, 4, 4, 2]
    assert sorted(np.concatenate(rows[:3])) == sorted(np.concatenate(rows[3:])) == list(range(10))
    assert not np.array_equal(np.concatenate(rows[:3]), np.concatenate(rows[3:]))


def test_one_sgd_step_is_the_gradient_times_the_rate() -> None:
    federation = federation_for(optimizer="sgd", lr=0.5, local_steps=1, batch_size=1000)
    sent = broadcast(federation)
    update, memory = local_update(federation.client_side, federation.client(3), sent)
    x, y = client_data(federation, 3)
    params = {name: tensor.clone().requires_grad_() for name, tensor in sent.model.items()}
    loss = F.cross_entropy(federation.problem.forward(params, x), y)
    grads = torch.autograd.grad(loss, list(params.values()))
    for (name, before), grad in zip(sent.model.items(), grads, strict=True):
        torch.testing.assert_close(update.model[name], before - 0.5 * grad)
    assert (update.client, update.examples, update.steps, memory) == (3, len(y), 1, {})
    assert update.loss == pytest.approx(loss.item())


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_the_loop_is_a_plain_torch_loop(optimizer: str) -> None:
    federation = federation_for(optimizer=optimizer, local_epochs=2, weight_decay=0.01)
    sent = broadcast(federation, round_num=4)
    update, _ = local_update(federation.client_side, federation.client(2), sent)
    module = federation.problem.model
    module.load_state_dict(sent.model)
    kinds: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, 1e-3, weight_decay=0.01),
        "momentum": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, weight_decay=0.01),
        "adam": lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.01),
    }
    plain = kinds[optimizer](module.parameters())
    x, y = client_data(federation, 2)
    for some_x, some_y in batches((x, y), 16, update.steps, federation.problem.seeds.rng("batches", 4, 2)):
        plain.zero_grad()
        F.cross_entropy(module(some_x), some_y).backward()
        plain.step()
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(update.model[name], tensor, rtol=1e-5, atol=1e-6)


def test_persistent_moments_go_on_where_they_stopped() -> None:
    """Two rounds of one client from each other's result equal one long round, batch order aside."""
    federation = federation_for(optimizer="adam", client_state="persistent", local_steps=2, batch_size=1000)
    first, memory = local_update(federation.client_side, federation.client(0), broadcast(federation))
    assert {name.split(".")[1] for name in memory} == {"exp_avg", "exp_avg_sq", "step"}
    second, _ = local_update(federation.client_side, federation.client(0), Broadcast(2, first.model), memory)
    whole = federation_for(optimizer="adam", local_steps=4, batch_size=1000)
    once, _ = local_update(whole.client_side, whole.client(0), broadcast(whole))
    for name, tensor in once.model.items():
        torch.testing.assert_close(second.model[name], tensor, rtol=1e-5, atol=1e-6)
    fresh, _ = local_update(federation.client_side, federation.client(0), Broadcast(2, first.model))
    assert tree.digest(fresh.model) != tree.digest(second.model)


def test_a_slow_client_does_a_part_of_its_steps() -> None:
    federation = federation_for(local_epochs=4)
    whole, _ = local_update(federation.client_side, federation.client(1), broadcast(federation))
    part, _ = local_update(federation.client_side, federation.client(1), broadcast(federation), work=0.5)
    assert part.steps == whole.steps // 2


def test_the_broadcast_is_left_alone_and_the_same_call_gives_the_same_bits() -> None:
    federation = federation_for()
    sent = broadcast(federation)
    before = tree.digest(sent.model)
    one, _ = local_update(federation.client_side, federation.client(0), sent)
    two, _ = local_update(federation.client_side, federation.client(0), sent)
    assert tree.digest(sent.model) == before
    assert tree.digest(one.model) == tree.digest(two.model) != before


class Noisy(nn.Module):
    """Layers that draw from torch's global generator, that keep buffers, and that are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(self.body(x))
        return out


def test_dropout_is_keyed_buffers_travel_and_frozen_weights_stay() -> None:
    federation = Federation.create(tiny(batch_size=1000), train=TRAIN, test=TEST, model=Noisy)
    sent = broadcast(federation)
    torch.manual_seed(1)
    one, _ = local_update(federation.client_side, federation.client(0), sent)
    torch.manual_seed(2)
    two, _ = local_update(federation.client_side, federation.client(0), sent)
    assert tree.digest(one.model) == tree.digest(two.model)
    assert one.model["body.1.num_batches_tracked"] == 1
    assert sent.model["body.1.num_batches_tracked"] == 0
    assert not torch.equal(one.model["body.1.running_mean"], sent.model["body.1.running_mean"])
    assert torch.equal(one.model["frozen.weight"], sent.model["frozen.weight"])

"""MOON's contrastive term."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from by_hand import Noisy, assert_moved, federation_for, gradient, leaves, noise_like, trained
from problems import client_data
from torch import nn

from dynafed import UserError, tree


def test_the_first_step_moves_by_the_gradient_of_the_contrast() -> None:
    federation = federation_for("moon", moon__mu=2.0, moon__temperature=0.7)
    start = federation.problem.initial_model()
    previous = {name: start[name] + 0.3 * noise for name, noise in noise_like(start, 1).items()}
    params = leaves(start)
    x, _ = client_data(federation, 3)
    z, z_previous = federation.problem.features(params, x), federation.problem.features(previous, x)
    similar = F.cosine_similarity(z, z.detach()) / 0.7, F.cosine_similarity(z, z_previous) / 0.7
    contrast = F.cross_entropy(torch.stack(similar, 1), torch.zeros(len(x), dtype=torch.int64))
    grads = gradient(contrast, {name: params[name] for name in params if name.startswith("features.")})
    plain, _ = trained(federation_for())
    moved, memory = trained(federation, memory=previous)
    assert_moved(
        moved.model, plain.model, {name: -0.5 * 2.0 * grad for name, grad in grads.items()}, rtol=1e-3, atol=2e-6
    )
    assert torch.equal(moved.model["head.weight"], plain.model["head.weight"])
    assert tree.digest(memory) == tree.digest(tree.only(moved.model, federation.problem.trainable))


def test_the_loss_of_two_alike_models_is_log_2() -> None:
    federation = federation_for("moon", moon__mu=3.0)
    update, _ = trained(federation, memory=federation.problem.initial_model())
    plain, _ = trained(federation_for())
    assert update.loss == pytest.approx(plain.loss + 3 * math.log(2), rel=1e-5)


def test_without_a_previous_model_it_is_fedavg() -> None:
    update, memory = trained(federation_for("moon"))
    plain, _ = trained(federation_for())
    assert tree.digest(update.model) == tree.digest(plain.model)
    assert memory


def test_the_other_models_leave_the_batch_norms_alone() -> None:
    federation = federation_for("moon", model=Noisy)
    plain, _ = trained(federation_for(model=Noisy))
    update, _ = trained(federation, memory=tree.only(federation.problem.initial_model(), federation.problem.trainable))
    assert update.model["features.1.num_batches_tracked"] == 1
    assert torch.equal(update.model["features.1.running_var"], plain.model["features.1.running_var"])


@pytest.mark.parametrize("method", ["moon", "fedgen"])
def test_a_network_without_features_is_refused(method: str) -> None:
    with pytest.raises(UserError, match=f"{method} looks at the network's features, and Linear doesn't say"):
        federation_for(method, model=lambda: nn.Linear(6, 4))

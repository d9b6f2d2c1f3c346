"""FedProx, SCAFFOLD and FedDyn against arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from by_hand import (
    Noisy,
    assert_moved,
    federation_for,
    gradient,
    leaves,
    made,
    noise_like,
    number,
    one,
    parabola,
    seen_by_server,
    trained,
)
from problems import client_data, tiny

from dynafed import UserError
from dynafed.tree import map_tensors


def test_fedprox_s_first_step_is_fedavg_s_and_its_second_is_pulled_back_in_proportion() -> None:
    w0 = federation_for().problem.initial_model()
    w1, _ = trained(federation_for(local_steps=1))
    again, _ = trained(federation_for("fedprox", local_steps=1, fedprox__mu=0.8))
    plain, _ = trained(federation_for(local_steps=2))
    pulled, _ = trained(federation_for("fedprox", local_steps=2, fedprox__mu=0.8))
    for name in w0:
        torch.testing.assert_close(again.model[name], w1.model[name], rtol=0, atol=0)
    assert_moved(pulled.model, plain.model, {name: -0.5 * 0.8 * (w1.model[name] - w0[name]) for name in w0})


def test_fedprox_by_hand() -> None:
    # From 0 towards 4, rate 1/2, mu = 1: w = 2, then the gradient is (2 - 4) + (2 - 0) = 0.
    params, _ = parabola(made("fedprox", fedprox__mu=1.0), start=0, target=4, steps=2, lr=0.5)
    assert number(params) == 2.0


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_scaffold_s_correction_is_applied(optimizer: str) -> None:
    federation = federation_for("scaffold", optimizer=optimizer)
    c, own = noise_like(federation.problem.initial_model(), 1), noise_like(federation.problem.initial_model(), 2)
    plain, _ = trained(federation_for(optimizer=optimizer))
    corrected, _ = trained(federation, c, own)
    if optimizer == "sgd":
        assert_moved(corrected.model, plain.model, {name: -0.5 * (c[name] - own[name]) for name in c})
    else:
        assert not torch.equal(corrected.model["head.bias"], plain.model["head.bias"])


@pytest.mark.parametrize("option", ["I", "II"])
def test_after_one_full_step_both_options_remember_the_gradient(option: str) -> None:
    federation = federation_for("scaffold", scaffold__option=option)
    start = leaves(federation.problem.initial_model())
    x, y = client_data(federation, 3)
    grads = gradient(F.cross_entropy(federation.problem.forward(start, x), y), start)
    c, own = noise_like(start, 1), noise_like(start, 2)
    update, memory = trained(federation, c, own)
    for name, grad in grads.items():
        torch.testing.assert_close(memory[name], grad, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(update.extras["scaffold"][name], grad - own[name], rtol=1e-4, atol=2e-6)


def test_scaffold_by_hand() -> None:
    """Two clients of four, pulled to 4 and to -2; two steps each, rate 1/2; two rounds."""
    method = made("scaffold")
    assert (
        method.init_server(federation_for().problem, one(3.0) | federation_for().problem.initial_model())["head.bias"]
        .abs()
        .max()
        == 0
    )
    state = one(0)
    a, sent_a = parabola(method, 0, 4, 2, 0.5, state)
    b, sent_b = parabola(method, 0, -2, 2, 0.5, state)
    # 0 -> 2 -> 3 and 0 -> -1 -> -1.5; c_i = (w_global - w_i) / (2 * 1/2).
    assert (number(a), number(b)) == (3.0, -1.5)
    assert (number(sent_a.state), number(sent_b.state)) == (-3.0, 1.5)
    mean = map_tensors(lambda p, q: (p + q) / 2, sent_a.extras, sent_b.extras)
    state = method.server_step(one(0.75), state, seen_by_server(0, 0.75, 2, 4, mean)).state
    assert number(state) == -0.375  # half of the clients, mean change -0.75
    a, sent_a = parabola(method, 0.75, 4, 2, 0.5, state, sent_a.state)
    # The correction is -0.375 + 3 = 2.625: gradients -3.25 + 2.625 = -0.625 and -2.9375 + 2.625 = -0.3125.
    assert number(a) == 1.21875
    # c_i - c + (0.75 - 1.21875) = -3 + 0.375 - 0.46875
    assert number(sent_a.state) == -3.09375
    assert number(sent_a.extras) == -0.09375


def test_scaffold_s_gradient_at_the_global_model_leaves_the_batch_norms_alone() -> None:
    plain, _ = trained(federation_for(model=Noisy, optimizer="adam"))
    other, _ = trained(
        federation_for("scaffold", model=Noisy, optimizer="adam"), map_tensors(torch.zeros_like, _trainable())
    )
    assert other.model["features.1.num_batches_tracked"] == 1
    assert torch.equal(other.model["features.1.running_mean"], plain.model["features.1.running_mean"])


def _trainable() -> dict[str, torch.Tensor]:
    federation = federation_for(model=Noisy)
    return {
        name: tensor
        for name, tensor in federation.problem.initial_model().items()
        if name in federation.problem.trainable
    }


def test_scaffold_s_options() -> None:
    assert made("scaffold", optimizer="sgd").option == "II"
    assert made("scaffold", optimizer="momentum").option == made("scaffold", optimizer="adam").option == "I"
    with pytest.raises(UserError, match=r"scaffold.option = 'II' needs optimizer = 'sgd', not 'adam'"):
        tiny(method="scaffold", optimizer="adam", scaffold__option="II")


def test_feddyn_s_first_step_goes_along_the_remembered_gradient() -> None:
    last = noise_like(federation_for().problem.initial_model(), 1)
    plain, _ = trained(federation_for())
    bent, _ = trained(federation_for("feddyn", feddyn__alpha=0.3), memory=last)
    assert_moved(bent.model, plain.model, {name: 0.5 * last[name] for name in last})


def test_feddyn_s_penalty_has_a_gradient() -> None:
    w0 = federation_for().problem.initial_model()
    w1, _ = trained(federation_for(local_steps=1))
    plain, _ = trained(federation_for(local_steps=2))
    bent, memory = trained(federation_for("feddyn", local_steps=2, feddyn__alpha=0.8))
    assert_moved(bent.model, plain.model, {name: -0.5 * 0.8 * (w1.model[name] - w0[name]) for name in w0})
    for name, tensor in memory.items():
        torch.testing.assert_close(tensor, -0.8 * (bent.model[name] - w0[name]))


def test_feddyn_by_hand() -> None:
    """Two clients of four, pulled to 4 and to -2; two steps each, rate 1/2, alpha = 1; two rounds."""
    method = made("feddyn", feddyn__alpha=1.0)
    a, kept_a = parabola(method, 0, 4, 2, 0.5)
    b, kept_b = parabola(method, 0, -2, 2, 0.5)
    # 0 -> 2, where -2 + 2 = 0; 0 -> -1, where 1 - 1 = 0. The gradients there are -(w_i - w_global).
    assert (number(a), number(b)) == (2.0, -1.0)
    assert (number(kept_a.state), number(kept_b.state)) == (-2.0, 1.0)
    refined = method.server_step(one(0.5), one(0), seen_by_server(0, 0.5, 2, 4))
    assert number(refined.state) == -0.25  # 0 - 1 * (2 + -1) / 4
    assert number(refined.model) == 0.75  # 0.5 + 0.25
    a, kept_a = parabola(method, 0.75, 4, 2, 0.5, memory=kept_a.state)
    # Gradients: -3.25 + 2 = -1.25, w = 1.375; then -2.625 + 0.625 + 2 = 0.
    assert number(a) == 1.375
    assert number(kept_a.state) == -2.0 - 0.625
    again = method.server_step(one(1.0), refined.state, seen_by_server(0.75, 1.0, 2, 4))
    assert number(again.state) == -0.25 - 0.5 * 0.25
    assert number(again.model) == 1.375


def test_feddyn_takes_the_average_even_after_another_step() -> None:
    refined = made("feddyn", feddyn__alpha=1.0).server_step(one(9.0), one(0), seen_by_server(0, 0.5, 2, 4))
    assert number(refined.state) == -0.25
    assert number(refined.model) == 9.25

"""Algorithm 1: the matching loss falls without tuning, interruptions leave no trace, bad trajectories are told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from dynafed import UserError, optim, tree
from dynafed.models import ConvNetSettings, MLPSettings, convnet, mlp
from dynafed.seeds import Seeds
from dynafed.synthesis import DynaFedSettings, SyntheticData, finetune, matching_gradient, synthesize
from dynafed.synthesis.invariances import find_invariances
from dynafed.synthesis.quality import matching_by_segment
from dynafed.synthesis.synthesize import EXPLODED, Segments, SynthesisState
from dynafed.tree import Tree

SMALL = {"samples": 20, "iterations": 12, "inner_steps": 5, "segment": 2, "trajectory": 5, "inner_lr": 0.1}


def trained(model: nn.Module, shape: tuple[int, ...], classes: int, checkpoints: int = 6) -> list[Tree]:
    """A trajectory as a real run leaves it: some Adam steps between the checkpoints, on classes with structure."""
    rng = np.random.default_rng(0)
    centers = torch.from_numpy(rng.normal(size=(classes, *shape)).astype(np.float32))
    params = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.named_parameters()}
    optimizer = optim.Optimizer("adam", list(params.values()), 2e-3)
    path = [tree.clone_contiguous(params)]
    for _ in range(checkpoints - 1):
        for _ in range(10):
            y = torch.from_numpy(rng.integers(0, classes, 64))
            x = centers[y] + torch.from_numpy(rng.normal(size=(64, *shape)).astype(np.float32))
            loss = nn.functional.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
            optimizer.step(torch.autograd.grad(loss, list(params.values())))
        path.append(tree.clone_contiguous(params))
    return path


def seeded(make: Any, *arguments: Any) -> nn.Module:
    with Seeds(0).torch_seeded("model"):
        module: nn.Module = make(*arguments)
    return module


@pytest.fixture(scope="module")
def case() -> tuple[nn.Module, list[Tree]]:
    model = seeded(mlp, (6,), 4, MLPSettings(width=8))
    return model, trained(model, (6,), 4)


@pytest.mark.parametrize(
    ("make", "shape", "classes", "settings"),
    [
        (mlp, (12,), 4, MLPSettings(width=16)),
        (mlp, (1, 8, 8), 10, MLPSettings(width=64)),
        (mlp, (1, 8, 8), 100, MLPSettings(width=32)),
        (convnet, (1, 8, 8), 10, ConvNetSettings(width=16, depth=2)),
        (convnet, (3, 8, 8), 10, ConvNetSettings(width=32, depth=1)),
    ],
    ids=["rows", "mlp", "100 classes", "1 channel", "3 channels"],
)
def test_without_tuning_the_matching_loss_falls_by_a_quarter(
    make: Any, shape: tuple[int, ...], classes: int, settings: Any
) -> None:
    model = seeded(make, shape, classes, settings)
    losses: list[float] = []
    config = {"samples": max(30, classes), "iterations": 60, "inner_steps": 8, "segment": 3, "trajectory": 6}
    synthesize(
        model,
        trained(model, shape, classes),
        shape,
        classes,
        config,
        on_iteration=lambda iteration, loss, x: losses.append(loss),
    )
    assert np.mean(losses[-10:]) < 0.75


def test_the_same_seed_gives_the_same_samples_and_the_labels_stay_distributions(case: Any) -> None:
    model, path = case
    one, same, other = (synthesize(model, path, (6,), 4, SMALL, seed) for seed in (0, 0, 1))
    assert tree.digest(one.tree()) == tree.digest(same.tree()) != tree.digest(other.tree())
    torch.testing.assert_close(one.labels.sum(1), torch.ones(20))
    assert one.inner_lr > 0
    assert one.provenance["config"]["samples"] == 20
    assert {"seed", "trajectory", "version"} <= set(one.provenance)


class Stop(Exception):
    pass


@pytest.mark.parametrize("rates", ["single", "tensor", "scaled"])
@pytest.mark.parametrize("after", [1, 7])
def test_interrupted_and_resumed_it_ends_with_the_same_bits(case: Any, tmp_path: Path, after: int, rates: str) -> None:
    model, path = case
    config = SMALL | {"inner_rates": rates}
    whole = synthesize(model, path, (6,), 4, config)
    calls = 0

    def check_stop() -> None:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            raise Stop

    with pytest.raises(Stop):
        synthesize(model, path, (6,), 4, config, state_file=tmp_path / "state", check_stop=check_stop)
    seen: list[int] = []
    again = synthesize(
        model,
        path,
        (6,),
        4,
        config,
        state_file=tmp_path / "state",
        on_iteration=lambda iteration, loss, x: seen.append(iteration),
    )
    assert seen[0] == after + 1
    assert tree.digest(again.tree()) == tree.digest(whole.tree())
    assert not (tmp_path / "state").exists()


def test_the_state_of_another_task_or_a_damaged_file_is_not_taken_over(case: Any, tmp_path: Path) -> None:
    model, path = case
    whole = synthesize(model, path, (6,), 4, SMALL)
    state = SynthesisState(DynaFedSettings(samples=20), (6,), 4, 6, Seeds(0), torch.device("cpu"))
    state.save(tmp_path / "other", "another task")
    (tmp_path / "broken").write_bytes(b"nothing")
    for name in ("other", "broken"):
        assert tree.digest(synthesize(model, path, (6,), 4, SMALL, state_file=tmp_path / name).tree()) == tree.digest(
            whole.tree()
        )


def test_from_a_folder_of_checkpoints(case: Any, tmp_path: Path) -> None:
    model, path = case
    for number, checkpoint in enumerate(path):
        safetensors.torch.save_file(checkpoint, tmp_path / f"{number:03d}.safetensors")
    from_folder = synthesize(model, tmp_path, (6,), 4, SMALL)
    assert tree.digest(from_folder.tree()) == tree.digest(synthesize(model, path, (6,), 4, SMALL).tree())
    with pytest.raises(UserError, match="at least two"):
        synthesize(model, tmp_path / "empty", (6,), 4, SMALL)
    (tmp_path / "000.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="damaged"):
        synthesize(model, tmp_path, (6,), 4, SMALL)


def test_an_exploding_rate_is_halved_until_it_works(case: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, path = case
    losses: list[float] = []
    made = synthesize(
        model,
        path,
        (6,),
        4,
        SMALL | {"inner_lr": 1e6, "iterations": 40},
        on_iteration=lambda iteration, loss, x: losses.append(loss),
    )
    assert "inner rate halved" in caplog.text
    assert 0 < made.inner_lr < 1e6
    assert losses[-1] <= EXPLODED
    assert torch.isfinite(made.x).all()


def test_each_tensor_learns_a_rate_of_its_own(case: Any, tmp_path: Path) -> None:
    model, path = case
    losses: dict[str, list[float]] = {"single": [], "tensor": []}
    made = {
        rates: synthesize(
            model,
            path,
            (6,),
            4,
            SMALL | {"inner_rates": rates, "inner_lr_rate": 0.1, "iterations": 60},
            on_iteration=lambda iteration, loss, x, seen=seen: seen.append(loss),
        )
        for rates, seen in losses.items()
    }
    assert np.mean(losses["tensor"][-10:]) < np.mean(losses["single"][-10:])
    rates = made["tensor"].inner_rates
    assert rates is not None
    assert rates.shape == (6,)
    assert float(rates.log().mean().exp()) == pytest.approx(made["tensor"].inner_lr)
    assert float(rates.max() / rates.min()) > 1.5
    assert made["single"].inner_rates is None
    made["tensor"].save(tmp_path / "s.safetensors")
    again = SyntheticData.load(tmp_path / "s.safetensors", (6,), 4)
    assert tree.digest(again.tree()) == tree.digest(made["tensor"].tree())
    halved = synthesize(model, path, (6,), 4, SMALL | {"inner_rates": "tensor", "inner_lr": 1e6, "iterations": 40})
    assert halved.inner_lr < 1e6


def test_scaled_rates_start_at_way_over_gradient(case: Any) -> None:
    model, path = case
    fixed = {"distance": "l2", "inner_rates": "scaled", "inner_lr": 0.5, "inner_lr_rate": 0.0, "iterations": 1}
    samples: list[Tensor] = []
    keep = len(path) - 1  # a single segment: the whole trajectory
    made = synthesize(
        model,
        path,
        (6,),
        4,
        SMALL | fixed | {"segment": keep, "trajectory": keep + 1},
        on_iteration=lambda iteration, loss, x: samples.append(x.clone()),
    )
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in path[0].items()}
    outputs = torch.func.functional_call(model, leaves, (samples[0],))
    loss = nn.functional.cross_entropy(outputs, torch.full((20, 4), 0.25))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    ways = [path[-1][name] - path[0][name] for name in leaves]
    ratios = torch.stack([way.norm() / grad.norm() for way, grad in zip(ways, grads, strict=True)])
    assert made.inner_rates is not None
    torch.testing.assert_close(made.inner_rates.float(), 0.5 * ratios / ratios.log().mean().exp())
    assert made.inner_lr == pytest.approx(0.5)


def test_tensors_without_effect_start_at_the_common_rate() -> None:
    """A convolution's bias before a norm has neither a way nor a gradient in the quotient distance."""
    model = seeded(convnet, (1, 8, 8), 4, ConvNetSettings(width=8, depth=1))
    config = SMALL | {"inner_rates": "scaled", "distance": "quotient", "inner_lr_rate": 0.0, "iterations": 1}
    made = synthesize(model, trained(model, (1, 8, 8), 4), (1, 8, 8), 4, config)
    assert made.inner_rates is not None
    rates = dict(zip(dict(model.named_parameters()), made.inner_rates.tolist(), strict=True))
    assert rates["features.0.bias"] == pytest.approx(0.1)
    assert all(rate > 0 for rate in rates.values())


@pytest.mark.parametrize("distance", ["l2", "quotient"])
def test_the_loss_of_each_segment_is_the_one_that_was_minimized(case: Any, distance: str) -> None:
    model, path = case
    config = DynaFedSettings.of(SMALL | {"distance": distance, "inner_rates": "tensor", "inner_lr_rate": 0.1})
    made = synthesize(model, path, (6,), 4, config)
    # The rates go by the model's order, whatever that of a checkpoint is.
    sorted_path = [tree.sorted_by_name(checkpoint) for checkpoint in path]
    found = find_invariances(model, (6,)) if distance == "quotient" else None
    losses = matching_by_segment(model, Segments(sorted_path, config, Seeds(0), found), made)
    start, target, steps = path[1], path[3], config.inner_steps
    expected, *_ = matching_gradient(model, start, target, made.x, made.logits, made.lr, steps, distance=distance)
    assert losses[1] == pytest.approx(float(expected), rel=1e-5)


def test_the_paper_s_distance_gives_other_samples(case: Any) -> None:
    model, path = case
    quotient, default, l2 = (
        synthesize(model, path, (6,), 4, SMALL | changes)
        for changes in (
            {"distance": "quotient", "inner_rates": "scaled"},
            {},
            {"distance": "l2", "inner_rates": "auto"},
        )
    )
    assert quotient.inner_rates is not None
    assert l2.inner_rates is None
    assert tree.digest(quotient.tree()) == tree.digest(default.tree()) != tree.digest(l2.tree())


def test_a_trajectory_that_moves_only_without_effect_stands_still(case: Any) -> None:
    model, path = case
    shifted = [path[0] | {"head.bias": path[0]["head.bias"] + number} for number in range(6)]
    with pytest.raises(UserError, match="doesn't move"):
        synthesize(model, shifted, (6,), 4, SMALL | {"distance": "quotient"})


def test_a_trajectory_that_stands_still_is_told(case: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, path = case
    with pytest.raises(UserError, match="doesn't move"):
        synthesize(model, [path[0]] * 6, (6,), 4, SMALL)
    synthesize(model, [path[0], path[0], *path[1:]], (6,), 4, SMALL)
    assert "1 segments" in caplog.text
    with pytest.raises(UserError, match="too few"):
        synthesize(model, path[:2], (6,), 4, SMALL)
    with pytest.raises(UserError, match="lacks"):
        synthesize(model, [{"w": torch.zeros(1)}] * 5, (6,), 4, SMALL)


def test_how_targets_are_drawn(case: Any) -> None:
    _, path = case
    whole = [tree.nest({"m": checkpoint})["m/head.bias"] for checkpoint in path]

    def targets(**changes: Any) -> list[tuple[int, Tensor]]:
        config = DynaFedSettings(segment=3, **changes)
        drawn = [Segments(path, config, Seeds(0)).draw(iteration) for iteration in range(40)]
        return [(segment.index, segment.target["head.bias"]) for segment in drawn]

    assert {start for start, _ in targets()} == {0, 1, 2}
    assert all(torch.equal(target, whole[start + 3]) for start, target in targets(target_draw="last"))
    for start, target in targets(targets=(1,)):
        assert any(torch.equal(target, whole[start + ahead]) for ahead in (1, 2, 3))
    pairs = [(1, 2), (1, 3), (2, 3)]
    for start, target in targets():
        assert any(torch.allclose(target, (whole[start + a] + whole[start + b]) / 2) for a, b in pairs)
    for start, target in targets(targets=(3,)):
        torch.testing.assert_close(target, sum(whole[start + ahead] for ahead in (1, 2, 3)) / 3)
    for start, target in targets(target_draw="tail", targets=(2,)):
        torch.testing.assert_close(target, (whole[start + 2] + whole[start + 3]) / 2)
    assert len({round(float(target[0]), 6) for _, target in targets(target_draw="replacement", targets=(2, 3))}) > 9


def test_labels_and_rate_can_be_fixed(case: Any) -> None:
    model, path = case
    made = synthesize(model, path, (6,), 4, SMALL | {"learn_labels": False, "inner_lr_rate": 0.0})
    assert torch.equal(made.logits, torch.zeros(20, 4))
    assert made.inner_lr == pytest.approx(0.1)


def test_synthetic_sets_are_saved_with_their_provenance_and_checked_when_read(case: Any, tmp_path: Path) -> None:
    model, path = case
    made = synthesize(model, path, (6,), 4, SMALL)
    made.save(tmp_path / "s.safetensors")
    again = SyntheticData.load(tmp_path / "s.safetensors", (6,), 4)
    assert tree.digest(again.tree()) == tree.digest(made.tree())
    assert again.provenance["config"]["inner_steps"] == 5
    with pytest.raises(UserError, match="not \\(7,\\) in 4"):
        SyntheticData.load(tmp_path / "s.safetensors", (7,), 4)
    with pytest.raises(UserError, match="no synthetic set"):
        SyntheticData.load(tmp_path / "absent", (6,), 4)
    SyntheticData(made.x * np.inf, made.logits, 0.1).save(tmp_path / "bad.safetensors")
    with pytest.raises(UserError, match="NaN or infinity"):
        SyntheticData.load(tmp_path / "bad.safetensors", (6,), 4)


def test_fine_tuning_by_hand(case: Any) -> None:
    model, path = case
    made = synthesize(model, path, (6,), 4, SMALL)
    config = DynaFedSettings(finetune_optimizer="sgd", finetune_lr=0.5, finetune_steps=1)
    tuned = finetune(model, path[0], made, config, Seeds(0), 1)
    params = {name: tensor.clone().requires_grad_() for name, tensor in path[0].items()}
    logits = torch.func.functional_call(model, params, (made.x,))
    loss = -(made.labels * logits.log_softmax(1)).sum() / 20
    for (name, tensor), grad in zip(path[0].items(), torch.autograd.grad(loss, list(params.values())), strict=True):
        torch.testing.assert_close(tuned[name], tensor - 0.5 * grad)
    nothing = DynaFedSettings(finetune_steps=0)
    assert finetune(model, path[0], made, nothing, Seeds(0), 1) is path[0]
    batched = DynaFedSettings(finetune_steps=3, finetune_batch=8, augment=True)
    one, same, later = (finetune(model, path[0], made, batched, Seeds(0), round_num) for round_num in (1, 1, 2))
    assert tree.digest(one) == tree.digest(same) != tree.digest(later)


class Scaled(nn.Module):
    """A ConvNet whose output a buffer scales."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet((1, 8, 8), 4, ConvNetSettings(width=8, depth=1))
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x) * self.scale
        return out


@pytest.mark.parametrize("batch", [0, 30])
def test_fine_tuning_in_threads_has_the_same_bits_and_the_given_buffers(batch: int) -> None:
    model = seeded(Scaled)
    rng = torch.Generator().manual_seed(0)
    made = SyntheticData(torch.randn(100, 1, 8, 8, generator=rng), torch.randn(100, 4, generator=rng), 0.1)
    config = DynaFedSettings(finetune_steps=3, finetune_batch=batch, finetune_optimizer="sgd", finetune_lr=0.1)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    one, three = (finetune(model, weights, made, config, Seeds(0), 1, threads) for threads in (1, 3))
    assert tree.digest(one) == tree.digest(three) != tree.digest(weights)
    still = finetune(model, weights | {"scale": torch.tensor(0.0)}, made, config, Seeds(0), 1)
    assert all(torch.equal(still[name], weights[name]) for name in weights if name != "scale")
    assert still["scale"] == 0


def test_bits_do_not_depend_on_log_level(case: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, path = case
    caplog.set_level(logging.INFO, "dynafed")
    automatic = {key: value for key, value in SMALL.items() if key != "inner_lr"}
    synthesize(model, path, (6,), 4, automatic)
    assert "inner rate starts at" in caplog.text

"""DynaFed around Flower's strategies, in an in-process grid."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from federation import NODES, ROUNDS, SMALL, Weights, equal, initial, network, run, train, wrapped
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, FedAvgM, Strategy
from grid import answer
from problems import TEST, TRAIN, tiny
from torch import nn

from dynafed.engine.federation import Federation
from dynafed.engine.server import server_broadcast, server_update
from dynafed.errors import UserError
from dynafed.flower import DynaFed, Refiner
from dynafed.flower.records import from_record
from dynafed.messages import Update
from dynafed.synthesis import DynaFedSettings, Synthetic

PLAIN: dict[str, Callable[[], Strategy]] = {
    "FedAvg": FedAvg,
    "FedAvgM": lambda: FedAvgM(server_momentum=0.5, server_learning_rate=0.8),
    "FedAdagrad": lambda: flower.FedAdagrad(eta=0.01),
    "FedAdam": lambda: flower.FedAdam(eta=0.01),
    "FedYogi": flower.FedYogi,
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1),
    "FedMedian": flower.FedMedian,
    "FedTrimmedAvg": flower.FedTrimmedAvg,
    "Krum": lambda: flower.Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: flower.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3),
    "Bulyan": lambda: flower.Bulyan(num_malicious_nodes=1),
    "QFedAvg": lambda: flower.QFedAvg(client_learning_rate=0.1),
}
PRIVATE: dict[str, Callable[[], Strategy]] = {
    "server-fixed": lambda: flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.02, 1.0, NODES),
    "client-fixed": lambda: flower.DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.02, 1.0, NODES),
    "server-adaptive": lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.02, NODES),
    "client-adaptive": lambda: flower.DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), 0.02, NODES),
    "server-fixed FedAvgM": lambda: flower.DifferentialPrivacyServerSideFixedClipping(
        PLAIN["FedAvgM"](), 0.02, 1.0, NODES
    ),
}
ALL = PLAIN | PRIVATE
TOLERANCE = dict.fromkeys(("FedAdagrad", "FedAdam", "FedYogi", "QFedAvg"), 1e-05) | {"server-fixed FedAvgM": 0.01}
"""The first four return float64, and clients work in float32. Alone, FedAvgM doesn't know of the noise around it."""


@pytest.mark.parametrize("name", ALL)
def test_any_strategy_is_refined(name: str) -> None:
    result, models = run(wrapped(ALL[name]()))
    _, bare = run(ALL[name]())
    sent = dict(initial().to_torch_state_dict())
    for model in models.values():
        assert {key: tensor.dtype for key, tensor in model.items()} == {key: t.dtype for key, t in sent.items()}
        assert list(model) == list(sent)
    for number in range(ROUNDS + 1):
        if number <= SMALL["trajectory"]:
            assert close(models[number], bare[number], TOLERANCE.get(name, 0)), number
        else:
            assert not close(models[number], bare[number], 1e-4), number
    assert set(result.train_metrics_clientapp[4]) - {"train_loss", "norm_bit"} == {
        "dynafed_inner_lr",
        "dynafed_inner_lr_max",
        "dynafed_inner_lr_min",
        "dynafed_matching_loss",
        "dynafed_invariant_share",
        "dynafed_invariant_share_unused",
    }
    assert set(result.train_metrics_clientapp[5]) == {"train_loss", "norm_bit"}
    assert result.evaluate_metrics_clientapp[8]["accuracy"] == pytest.approx(0.5)


@pytest.mark.parametrize("name", ALL)
def test_no_fine_tuning_is_the_bare_strategy(name: str) -> None:
    _, models = run(wrapped(ALL[name](), config=SMALL | {"finetune_steps": 0}))
    _, bare = run(ALL[name]())
    assert all(close(models[number], bare[number], TOLERANCE.get(name, 0)) for number in bare)


def close(one: Weights, other: Weights, tolerance: float) -> bool:
    """The same bits, unless there is a tolerance."""
    if not tolerance:
        return equal(one, other)
    return all(torch.allclose(one[name], other[name].float(), rtol=0, atol=tolerance) for name in one)


def test_it_equals_the_engine_s_own_dynafed_bit_for_bit() -> None:
    changes = {f"dynafed.{key}": value for key, value in SMALL.items()}
    federation = Federation.create(
        tiny(method="dynafed", clients=2, participation=1.0, **changes), train=TRAIN, test=TEST
    )

    def local(number: int, client: int, sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.manual_seed(100 * number + client)
        return {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in sent.items()}

    model = federation.problem.initial_model()
    server = {step.name: step.init_server(federation.problem, model) for step in federation.methods.steps}
    expected = []
    for number in range(1, ROUNDS + 1):
        sent = server_broadcast(federation.server_side, number, model, server)
        updates = [Update(client, local(number, client, model), 10, 1, 0.0, 0.0) for client in (1, 2)]
        outcome = server_update(federation.server_side, sent, server, updates)
        model, server = outcome.model, dict(outcome.server)
        expected.append(model)

    def client(node: int, message: Message) -> RecordDict:
        number = message.content["config"]["server-round"]
        return answer(ArrayRecord(local(number, node, from_record(message.content["arrays"]))))

    strategy = wrapped(FedAvg(), model=lambda: copy.deepcopy(federation.problem.model), seed=federation.config.seed)
    _, models = run(strategy, client, nodes=2, arrays=ArrayRecord(federation.problem.initial_model()))
    for number, wanted in enumerate(expected, 1):
        assert equal(models[number], wanted), number


# Server momentum


def one_weight() -> nn.Module:
    return nn.Linear(1, 1, bias=False)


def one_less(node: int, message: Message) -> RecordDict:
    """Whatever the model, a client moves it by -1."""
    (array,) = message.content["arrays"].values()
    return answer(ArrayRecord({"weight": Array(array.numpy() - np.float32(1))}), train_loss=1.0)


class Lifting(DynaFed):
    """Refines by adding a number, so that results can be worked out by hand."""

    def __init__(self, strategy: Strategy, lift: float) -> None:
        super().__init__(strategy, model=one_weight, shape=(1,), classes=1, config=SMALL)
        plain = self.refiner.refine

        def refine(server_round: int, arrays: ArrayRecord | None) -> ArrayRecord | None:
            arrays = plain(server_round, arrays)
            return arrays and ArrayRecord({"weight": Array(arrays["weight"].numpy() + np.float32(lift))})

        self.refiner.refine = refine  # type: ignore[method-assign]


def weights(strategy: Strategy, rounds: int) -> list[float]:
    start = ArrayRecord({"weight": Array(np.zeros((1, 1), np.float32))})
    _, models = run(strategy, one_less, rounds, arrays=start)
    return [float(models[number]["weight"]) for number in range(rounds + 1)]


def test_server_momentum_sees_the_refined_model() -> None:
    # Every pseudo-gradient is 1, so the momentum is 1, 0.5 + 1 = 1.5, 0.75 + 1 = 1.75.
    # Round 1: 0 - 1, refined to 9. Round 2: 9 - 1.5, refined to 17.5. Round 3: 17.5 - 1.75, refined to 25.75.
    assert weights(Lifting(FedAvgM(server_momentum=0.5), 10), 3) == pytest.approx([0, 9, 17.5, 25.75])


@pytest.mark.parametrize("name", ["FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "QFedAvg", "server-fixed FedAvgM"])
def test_every_server_optimizer_steps_from_what_the_clients_got(name: str) -> None:
    """The clients' steps don't depend on where they start; then the server's don't either."""
    make = ALL[name]
    lifted, plain = (np.array(weights(Lifting(make(), lift), 6)) for lift in (10, 0))
    assert lifted == pytest.approx(plain + 10 * np.arange(7), abs=1e-4)


# Rounds that fail


class Failing:
    """A client that doesn't answer in some rounds, or answers nonsense."""

    def __init__(self, rounds: tuple[int, ...], nan: bool = False) -> None:
        self.rounds, self.nan = rounds, nan

    def __call__(self, node: int, message: Message) -> RecordDict:
        reply = train(node, message)
        if message.content["config"]["server-round"] in self.rounds and "arrays" in reply and reply["arrays"]:
            if not self.nan:
                raise RuntimeError("out of memory")
            bias = reply["arrays"]["0.bias"].numpy()
            bias[node % 3] = np.nan
            reply["arrays"]["0.bias"] = Array(bias)
        return reply


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("name", ["FedAvg", "FedAvgM", "FedAdam", "FedMedian"])
def test_a_lost_round_changes_nothing(name: str, nan: bool, caplog: pytest.LogCaptureFixture) -> None:
    strategy = wrapped(PLAIN[name]())
    result, models = run(strategy, Failing((2, 4, 7), nan), rounds=9)
    for lost in (2, 4, 7):
        assert equal(models[lost], models[lost - 1])
    # Rounds 1, 3, 5 and 6 are the four that are recorded.
    assert [number for number, metrics in result.train_metrics_clientapp.items() if "dynafed_inner_lr" in metrics] == [
        6
    ]
    assert all(torch.isfinite(tensor).all() for tensor in models[9].values())
    assert not equal(models[9], models[8])


def test_if_every_client_always_fails_it_says_so_and_the_model_stays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "flwr"):
        result, models = run(wrapped(FedAvg()), Failing(tuple(range(1, 9))))
    assert equal(models[8], dict(initial().to_torch_state_dict()))
    assert list(result.arrays) == list(initial())
    assert "round 3 has no aggregate" in caplog.text


def test_nan_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "flwr"):
        run(wrapped(FedAvg()), Failing((3,), nan=True), rounds=3)
    assert "the reply of node 2 is left out: '0.bias' holds NaN or infinity" in caplog.text
    assert "round 3 has no aggregate" in caplog.text


class Huge:
    """Node 2 sends numbers that are finite, and far too large, in every round."""

    def __call__(self, node: int, message: Message) -> RecordDict:
        reply = train(node, message)
        if node == 2 and "0.bias" in reply["arrays"]:
            reply["arrays"]["0.bias"] = Array(np.full(8, 1e30, np.float32))
        return reply


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam"])
def test_a_huge_reply_is_left_out(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, models = run(wrapped(PLAIN[name](), folder=tmp_path), Huge())
    assert all(float(tensor.abs().max()) < 100 for tensor in models[ROUNDS].values())
    assert not equal(models[1], models[0])
    assert "the reply of node 2 is left out: an update of norm" in caplog.text
    assert "norms/model" in safetensors.torch.load_file(tmp_path / "flower.safetensors")
    with pytest.raises(UserError, match="large_updates = 'maybe' is not one of reject, accept"):
        wrapped(FedAvg(), large_updates="maybe")


def test_an_absurd_aggregate_is_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    _, models = run(wrapped(flower.FedAdam(eta=1e20)))
    assert equal(models[ROUNDS], models[0])
    assert "the aggregate of round 1 is no model: a step of norm" in caplog.text


# Layouts


class Odd(nn.Module):
    """Tied weights, a frozen layer, whole-number and other buffers."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(6))
        self.register_buffer("scale", torch.tensor(scale))
        self.a, self.b, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.b.weight = self.a.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(torch.relu(self.b(torch.relu(self.a(x[:, self.order])))) * self.scale)


def odd_client(node: int, message: Message) -> RecordDict:
    arrays = message.content["arrays"].to_torch_state_dict()
    torch.manual_seed(node)
    step = 0.1 * torch.randn(6, 6)
    for name in ("a.weight", "b.weight"):
        arrays[name] = (arrays[name] + step).to(arrays[name].dtype)
    return answer(ArrayRecord(arrays))


@pytest.mark.parametrize("half", [False, True])
def test_buffers_frozen_and_tied_weights_and_dtypes_pass_unharmed(half: bool) -> None:
    torch.manual_seed(0)
    there = Odd(scale=0.5).state_dict()
    if half:
        there = {name: t.half() if t.is_floating_point() else t for name, t in there.items()}
    backwards = {name: there[name] for name in reversed(list(there))}
    strategy = wrapped(FedAvg(fraction_evaluate=0), model=Odd)
    _, models = run(strategy, odd_client, nodes=3, arrays=ArrayRecord(backwards))
    final = models[ROUNDS]
    assert list(final) == list(backwards)
    for name, tensor in final.items():
        assert tensor.dtype == there[name].dtype
        # Thirds of three equal numbers don't always add up to that number: the whole ones must all the same.
        assert tensor.is_floating_point() or torch.equal(tensor, there[name])
        assert torch.allclose(tensor, there[name], atol=2e-3) == (
            name not in ("a.weight", "b.weight", "a.bias", "b.bias")
        )
    assert torch.equal(final["a.weight"], final["b.weight"])
    # The synthesis saw the federation's own frozen layer and buffers, not those that the factory made up.
    assert torch.equal(strategy.refiner.problem.module.scale, torch.tensor(0.5))
    assert torch.equal(strategy.refiner.problem.module.frozen.weight, final["frozen.weight"].float())


def test_arrays_without_names_are_taken_in_the_model_s_order() -> None:
    def numbered(node: int, message: Message) -> RecordDict:
        sent = message.content["arrays"].to_numpy_ndarrays()
        return answer(ArrayRecord([array + np.float32(0.1 * node) for array in sent]))

    def named(node: int, message: Message) -> RecordDict:
        sent = message.content["arrays"].items()
        return answer(ArrayRecord({name: Array(array.numpy() + np.float32(0.1 * node)) for name, array in sent}))

    strategies = [wrapped(FedAvg(fraction_evaluate=0)) for _ in range(2)]
    _, without = run(strategies[0], numbered, arrays=ArrayRecord(initial().to_numpy_ndarrays()))
    _, names = run(strategies[1], named)
    assert list(without[8]) == ["0", "1", "2", "3"]
    assert all(torch.equal(a, b) for a, b in zip(without[8].values(), names[8].values(), strict=True))


# Those who write their own strategy


def test_the_refiner_alone_does_the_same() -> None:
    class Mine(FedAvg):
        def __init__(self) -> None:
            super().__init__()
            self.refiner = Refiner(model=network, shape=(6,), classes=4, config=DynaFedSettings(**SMALL))

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            return self.refiner.refine(server_round, arrays), metrics

    mine = Mine()
    _, models = run(mine)
    _, expected = run(wrapped(FedAvg()))
    assert all(equal(models[number], expected[number]) for number in expected)
    parts = ("x", "logits", "inner_lr", "inner_rates")
    assert set(mine.refiner.state) == {f"synthetic/{part}" for part in parts}


def test_the_initial_model_can_be_part_of_the_trajectory_and_d_syn_can_be_given(tmp_path: Path) -> None:
    first = wrapped(FedAvg(), config=SMALL | {"include_initial": True}, folder=tmp_path / "run")
    _, models = run(first)
    made = Synthetic.load(tmp_path / "run" / "synthetic.safetensors", (6,), 4)
    assert made.provenance["checkpoints"] == 5
    given = SMALL | {"synthetic": str(tmp_path / "run" / "synthetic.safetensors")}
    _, again = run(wrapped(FedAvg(), config=given))
    assert equal(again[8], models[8])


# Errors


def test_what_can_t_work_is_refused_in_one_line(tmp_path: Path) -> None:
    def norm() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

    cases: list[tuple[str, dict[str, Any]]] = [
        ("'1' is a BatchNorm layer", {"model": norm}),
        ("unknown key 'dynafed.sampels': did you mean 'dynafed.samples'", {"config": {"sampels": 3}}),
        ("dynafed.samples = 0 must be at least 1", {"config": {"samples": 0}}),
        ("raise dynafed.trajectory", {"config": {"trajectory": 4}}),
        ("dynafed.evidence", {"config": SMALL | {"evidence": True}}),
        ("can't take samples of shape (5,)", {"shape": (5,)}),
        ("4 outputs for a sample, but there are 3 classes", {"classes": 3}),
        ("must be a function", {"model": network()}),
        ("is no synthetic set", {"config": SMALL | {"synthetic": "absent"}}),
    ]
    for message, changes in cases:
        with pytest.raises(UserError) as caught:
            wrapped(FedAvg(), **changes)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    for wrong in (FedAvg, "FedAvg", None):
        with pytest.raises(UserError, match=r"a strategy from flwr\.serverapp\.strategy"):
            wrapped(wrong)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="can't make the folder"):
        wrapped(FedAvg(), folder=tmp_path / "file")


def test_arrays_of_another_model_are_refused_before_a_client_works() -> None:
    def other(**changes: torch.Tensor) -> ArrayRecord:
        return ArrayRecord({**initial().to_torch_state_dict(), **changes})

    for arrays, message in (
        (other(**{"2.bias": torch.zeros(5)}), r"'2\.bias' has shape \(5,\), not \(4,\)"),
        (other(extra=torch.zeros(1)), "'extra' is not expected"),
        (ArrayRecord({"0.bias": Array(np.zeros(8))}), r"'0\.weight' is missing"),
    ):
        with pytest.raises(UserError, match=f"don't fit the model that DynaFed was given: {message}"):
            run(wrapped(FedAvg()), arrays=arrays)


def test_too_few_rounds_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "flwr"):
        run(wrapped(FedAvg()), rounds=4)
    assert "num_rounds = 4 leaves none after dynafed.trajectory" in caplog.text
    assert "synthesis 0 of 10" in caplog.text
    assert "synthesis 10 of 10" in caplog.text
    assert "D_syn is made; inner_lr" in caplog.text


def test_flower_is_only_needed_where_it_is_used() -> None:
    code = "import sys; sys.modules['flwr'] = None; import dynafed; print('fine'); import dynafed.flower"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n"
    assert done.stderr.splitlines()[-1].endswith("dynafed.flower needs Flower: pip install dynafed[flower]")


def test_fine_tuning_that_diverges_never_reaches_the_clients(caplog: pytest.LogCaptureFixture) -> None:
    _, models = run(wrapped(FedAvg(), config=SMALL | {"finetune_lr": 1e30, "finetune_steps": 5}))
    assert all(np.isfinite(np.asarray(array)).all() for model in models.values() for array in model.values())
    assert "fine-tuning round" in caplog.text

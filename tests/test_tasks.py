"""Several labels at once, numbers, losses of one's own: what is learned, how it is measured, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import TEST, TRAIN, blobs, run_tiny, tiny
from torch import nn

import dynafed
from dynafed import UserError, tree
from dynafed.engine.federation import Federation
from dynafed.models import Classifier
from dynafed.tasks import Task, add_up

RNG = np.random.default_rng(0)
SLOPES = np.arange(1, 7, dtype=np.float32)


def numbers(samples: int, wide: bool = False) -> tuple[np.ndarray, np.ndarray]:
    x = RNG.normal(size=(samples, 6)).astype(np.float32)
    y = x @ SLOPES + 2
    return x, np.stack([y, -y], 1) if wide else y


def labels(samples: int) -> tuple[np.ndarray, np.ndarray]:
    x = RNG.normal(size=(samples, 6)).astype(np.float32)
    return x, (x[:, :3] > 0).astype(int)


NUMBERS = {f"site {i}": numbers(20 + i) for i in range(5)}
LABELS = [labels(24) for _ in range(5)]
FAST = {"rounds": 30, "optimizer": "sgd", "lr": 0.05, "participation": 1.0}


@pytest.mark.parametrize("wide", [False, True])
def test_numbers_are_learned(wide: bool, tmp_path: Path) -> None:
    clients = {name: numbers(20 + 3 * number, wide) for number, name in enumerate("abcde")}
    outputs = 1 + wide
    result = dynafed.run(
        tiny(**FAST),
        model=lambda shape, k: nn.Linear(*shape, k),
        clients=clients,
        test=numbers(50, wide),
        loss="mse",
        out=tmp_path,
    )
    last = result.history[-1]
    assert result.federation.problem.classes == outputs
    assert last["r2"] > 0.99
    assert last["rmse"] == pytest.approx(last["loss"] ** 0.5, rel=1e-5)
    assert result.summary["metric"] == "rmse"
    assert result.summary["best"] == min(record["rmse"] for record in result.history)
    assert "rmse" in repr(result)
    with pytest.raises(UserError, match="no accuracy"):
        _ = result.final_accuracy
    assert "root mean squared error" in (tmp_path / "report.html").read_text()


def test_metrics_of_numbers_are_those_of_the_whole() -> None:
    task = Task("mse", "numbers", F.mse_loss)
    outputs, y = torch.randn(40, 2), torch.randn(40, 2)
    found = task.metrics(add_up([task.tally(outputs[:15], y[:15]), task.tally(outputs[15:], y[15:])]))
    assert found["loss"] == pytest.approx(float(F.mse_loss(outputs, y)), rel=1e-5)
    assert found["mae"] == pytest.approx(float((outputs - y).abs().mean()), rel=1e-5)
    assert found["r2"] == pytest.approx(float(1 - ((outputs - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()), rel=1e-4)


def test_several_labels_at_once(tmp_path: Path) -> None:
    result = dynafed.run(
        tiny(**FAST | {"lr": 1.0}),
        model=lambda: nn.Linear(6, 3),
        clients=LABELS,
        test=labels(80),
        loss="bce",
        out=tmp_path,
    )
    last = result.history[-1]
    assert last["accuracy"] > 0.85
    assert 0.8 < last["f1"] <= 1
    task = Task("bce", "labels", F.binary_cross_entropy_with_logits)
    outputs, y = torch.tensor([[1.0, -1, 1], [-1, -1, 1]]), torch.tensor([[1.0, 0, 0], [1, 0, 1]])
    found = task.metrics(task.tally(outputs, y))
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert found["f1"] == pytest.approx(4 / 6)
    assert found["loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(outputs, y)))


def test_a_loss_of_one_s_own(tmp_path: Path) -> None:
    def smooth(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, y, label_smoothing=0.1)

    own = dynafed.run(tiny(), train=TRAIN, test=TEST, loss=smooth, out=tmp_path / "own")
    assert own.federation.config.loss == "custom"
    assert own.history[-1]["loss"] < own.history[0]["loss"]
    plain = dynafed.run(tiny(), train=TRAIN, test=TEST, loss=lambda o, y: F.cross_entropy(o, y), out=tmp_path / "plain")
    assert tree.pack(plain.state.model) == tree.pack(run_tiny(tmp_path / "built-in").state.model)
    with pytest.raises(UserError, match="pass it again as loss="):
        dynafed.resume(tmp_path / "own", train=TRAIN, test=TEST)
    again = dynafed.resume(tmp_path / "own", train=TRAIN, test=TEST, loss=smooth, changes={"rounds": 7})
    assert len(again.history) == 7
    huber = dynafed.run(
        tiny(rounds=1), model=lambda: nn.Linear(6, 1), clients=NUMBERS, test=numbers(9), loss=F.huber_loss, out=tmp_path
    )
    assert huber.summary["metric"] == "rmse"
    with pytest.raises(UserError, match="one number, the mean loss"):
        dynafed.run(tiny(), train=TRAIN, test=TEST, loss=lambda o, y: o.sum(1), out=tmp_path / "x")
    with pytest.raises(UserError, match="the loss function failed: ZeroDivisionError"):
        dynafed.run(tiny(), train=TRAIN, test=TEST, loss=lambda o, y: 1 / 0, out=tmp_path / "x")


def network(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Classifier(nn.Sequential(nn.Linear(*shape, 4), nn.ReLU()), 4, outputs)


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "feddyn", "moon", "fedadam", "fednova", "median+average"])
def test_methods_without_classes_learn_numbers_with_any_worker_count(method: str, tmp_path: Path) -> None:
    models = [
        dynafed.run(
            tiny(method=method, rounds=3, workers=workers, participation=1.0),
            model=network,
            clients=NUMBERS,
            test=NUMBERS["site 0"],
            loss="mse",
            out=tmp_path / str(workers),
        ).state.final_model
        for workers in (1, 2)
    ]
    assert tree.pack(models[0]) == tree.pack(models[1])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"method": "dynafed"}, "dynafed needs classes, and loss = 'mse' is for numbers"),
        ({"method": "fedmix"}, "fedmix needs classes"),
        ({"method": "fedgen"}, "fedgen needs classes"),
        ({"attack__kind": "label-flip"}, "attack.kind = 'label-flip' needs classes"),
        ({"loss": "mea"}, "unknown loss 'mea'"),
    ],
)
def test_what_needs_classes_is_refused_before_round_1(parts: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        dynafed.run(
            tiny(**{"loss": "mse"} | parts), model=network, clients=NUMBERS, test=numbers(9), out=tmp_path / "r"
        )
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("loss", "train", "words"),
    [
        ("mse", (TRAIN[0], np.array(["a"] * 400)), "must be numbers"),
        ("mse", (TRAIN[0], np.full(400, np.nan)), "not a number"),
        ("mse", (TRAIN[0], np.zeros((400, 2, 2))), "a row for each sample"),
        ("mse", (TRAIN[0], np.zeros(7)), "400 rows of 1"),
        ("bce", (TRAIN[0], np.full((400, 2), 3)), "each label is 0 or 1"),
    ],
)
def test_wrong_targets_are_refused(loss: str, train: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Federation.create(tiny(partition="iid"), train=train, test=train, loss=loss)


def test_numbers_are_divided_without_classes() -> None:
    made = Federation.create(tiny(partition="iid", loss="mse", server_samples=40), train=numbers(200), test=numbers(9))
    assert sum(made.data.client_size(client) for client in range(8)) == 160
    with pytest.raises(UserError, match="divides classes"):
        Federation.create(tiny(loss="mse"), train=numbers(200), test=numbers(9))
    with pytest.raises(UserError, match="has classes, and loss = 'mse'"):
        Federation.create(tiny(loss="mse"))


CLIENTS = {f"clinic {i}": blobs(25 + i, i) for i in range(11)} | {"tiny": blobs(1, 99)}


def test_clients_hold_out_what_they_are_evaluated_on(tmp_path: Path) -> None:
    results = [
        dynafed.run(
            tiny(evaluate="clients", holdout=0.4, workers=workers, rounds=3),
            model=network,
            clients=CLIENTS,
            out=tmp_path / str(workers),
        )
        for workers in (1, 2)
    ]
    result, federation = results[0], results[0].federation
    strip = [{key: value for key, value in r.history[-1].items() if not key.startswith("seconds")} for r in results]
    assert strip[0] == strip[1]
    for number, (x, _) in enumerate(CLIENTS.values()):
        trained, held = federation.client(number).x, federation.held_out(number)[0]
        assert len(held) == (round(0.4 * len(x)) if len(x) > 1 else 0)
        assert sorted(map(tuple, torch.cat([trained, held]).tolist())) == sorted(map(tuple, x.tolist()))
    last = result.history[-1]
    assert list(last["accuracy_per_client"]) == [name for name in CLIENTS if name != "tiny"]
    weights, right = result.state.final_model, {}
    for number, name in enumerate(last["accuracy_per_client"]):
        x, y = federation.held_out(number)
        right[name] = (federation.problem.predict(weights, x).argmax(1) == y).float()
        assert last["accuracy_per_client"][name] == pytest.approx(float(right[name].mean()))
        assert last["loss_per_client"][name] == pytest.approx(federation.problem.mean_loss(weights, x, y), rel=1e-4)
    assert last["accuracy"] == pytest.approx(float(torch.cat([*right.values()]).mean()))
    assert last["accuracy_worst_tenth"] == pytest.approx(sum(sorted(last["accuracy_per_client"].values())[:2]) / 2)
    assert len(last["accuracy_per_class"]) == 4
    assert "confusion" not in last
    summary = json.loads((tmp_path / "1" / "summary.json").read_text())
    assert summary["accuracy_per_client"] == last["accuracy_per_client"]
    assert summary["accuracy_worst_tenth"] == last["accuracy_worst_tenth"]
    page = (tmp_path / "1" / "report.html").read_text()
    assert "Clients, worst first" in page
    assert "clinic 7" in page


def test_the_server_s_test_samples_give_a_confusion_matrix(tmp_path: Path) -> None:
    result = dynafed.run(
        tiny(evaluate="clients", eval_clients=4, rounds=2), model=network, clients=CLIENTS, test=TEST, out=tmp_path
    )
    last = result.history[-1]
    confusion = np.array(last["confusion"])
    assert confusion.sum(1).tolist() == np.bincount(TEST[1], minlength=4).tolist()
    assert confusion.trace() / 200 == last["accuracy_test"]
    assert 1 < len(last["accuracy_per_client"]) <= 4
    assert "Which class is taken for which" in (tmp_path / "report.html").read_text()


def test_a_split_dataset_s_clients_hold_out_too(tmp_path: Path) -> None:
    result = run_tiny(tmp_path, evaluate="clients", rounds=2, method="scaffold")
    assert len(result.history[-1]["accuracy_per_client"]) == 8
    assert result.history[-1]["accuracy_test"] > 0

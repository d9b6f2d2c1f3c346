"""A trained model as it is used; clients that a config names; networks with special wishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from problems import TEST, TRAIN, blobs, run_tiny, tiny
from torch import nn

import dynafed
from dynafed import UserError
from dynafed.cli import main
from dynafed.engine.federation import Federation
from dynafed.optim import epoch_orders

NAMES = np.array(["ash", "birch", "cedar", "dogwood"])


def test_raw_samples_get_labels_as_they_were_given(tmp_path: Path) -> None:
    scale = {"data.mean": [1.0] * 6, "data.std": [2.0] * 6, "rounds": 4, "workers": 1}
    clients = {name: (x, NAMES[y]) for name, (x, y) in (("a", blobs(80, 1)), ("b", blobs(90, 2)))}
    result = dynafed.run(
        dynafed.Config.load(None, scale), clients=clients, test=(TEST[0], NAMES[TEST[1]]), out=tmp_path
    )
    labels = result.predict(TEST[0])
    assert set(labels.tolist()) <= set(NAMES.tolist())
    metrics = result.evaluate(TEST[0], NAMES[TEST[1]])
    assert metrics["accuracy"] == pytest.approx(float((labels == NAMES[TEST[1]]).mean()))
    assert metrics["accuracy"] == pytest.approx(result.history[-1]["accuracy"])
    loaded = dynafed.load(tmp_path)
    assert loaded.predict(TEST[0]).tolist() == labels.tolist()
    assert loaded.evaluate(TEST[0], NAMES[TEST[1]]) == metrics
    assert torch.equal(loaded.model.state_dict()["head.weight"], result.state.final_model["head.weight"])
    assert json.loads((tmp_path / "model.json").read_text())["schema"]["labels"] == NAMES.tolist()
    with pytest.raises(UserError, match=r"shape \(5,\), but those of custom are float32 of shape \(6,\)"):
        loaded.predict(TEST[0][:, :5])


def test_images_are_normalized_for_prediction(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (60, 1, 4, 4), np.uint8)
    y = (images.mean((1, 2, 3)) > 127).astype(int)
    result = dynafed.run(tiny(rounds=2), train=(images, y), test=(images, y), out=tmp_path)
    expected = result.model(result.federation.schema.normalize(torch.from_numpy(images))).argmax(1)
    assert result.predict(images).tolist() == expected.tolist()
    assert dynafed.load(tmp_path).predict(images).tolist() == expected.tolist()


def test_a_network_of_one_s_own_must_be_given_again(tmp_path: Path) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    result = dynafed.run(tiny(rounds=2), model=network, train=TRAIN, test=TEST, out=tmp_path)
    assert dynafed.load(tmp_path, model=network).predict(TEST[0]).tolist() == result.predict(TEST[0]).tolist()
    with pytest.raises(UserError, match="pass it again as load"):
        dynafed.load(tmp_path)
    with pytest.raises(UserError, match="isn't the one of"):
        dynafed.load(tmp_path, model=lambda: nn.Linear(6, 4))
    with pytest.raises(UserError, match=r"no model\.json"):
        dynafed.load(tmp_path / "checkpoint")


def test_numbers_come_back_as_numbers(tmp_path: Path) -> None:
    x = TRAIN[0]
    y = x @ np.arange(6, dtype=np.float32)
    result = dynafed.run(tiny(rounds=1, partition="iid", loss="mse"), train=(x, y), test=(x, y), out=tmp_path)
    assert result.predict(x).shape == y.shape
    assert dynafed.load(tmp_path).evaluate(x, y)["rmse"] == pytest.approx(result.history[-1]["rmse"], rel=1e-5)


def write_tables(folder: Path, **columns: Any) -> dict[str, np.ndarray]:
    """One CSV file with a column `site`, and a folder with a file for each site."""
    x, y = blobs(90, 3, features=2)
    sites = np.array(["mercy", "luke", "general"])[np.arange(90) % 3]
    rows = [f"{s},{a!r},{b!r},{NAMES[label]}" for s, (a, b), label in zip(sites, x.tolist(), y, strict=True)]
    (folder / "all.csv").write_text("\n".join(["site,age,dose,kind", *rows]))
    (folder / "sites").mkdir()
    for site in ("mercy", "luke", "general"):
        own = [row.split(",", 1)[1] for row in rows if row.startswith(site)]
        (folder / "sites" / f"{site}.csv").write_text("\n".join(["age,dose,kind", *own]))
    return {"x": x, "y": NAMES[y]}


def test_a_config_names_files_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_tables(tmp_path)
    monkeypatch.chdir(tmp_path)
    common = 'rounds = 2\nworkers = 1\nparticipation = 1.0\nevaluate = "clients"\n[data]\ntarget = "kind"\n'
    Path("column.toml").write_text(f'{common}path = "all.csv"\nclient = "site"\n')
    Path("folder.toml").write_text(f'{common}path = "sites"\n')
    for name in ("column", "folder"):
        assert main(["run", f"{name}.toml", "--out", name]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("column", "folder")]
    assert weights[0] == weights[1]
    told = json.loads(Path("folder/partition.json").read_text())
    assert told["client_names"] == ["general", "luke", "mercy"]
    capsys.readouterr()
    assert main(["data", "check", "folder.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["clients"], found["samples"], found["columns"]) == (3, 90, ["age", "dose"])
    assert found["labels"] == NAMES.tolist()
    assert any("no test samples" in each for each in found["odd"])
    monkeypatch.chdir("/")
    assert main(["resume", str(tmp_path / "folder"), "-s", "rounds=3"]) == 0
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "column"), str(tmp_path / "all.csv")]) == 0
    printed = capsys.readouterr().out.split()
    assert printed == ["prediction", *dynafed.load(tmp_path / "column").predict(data["x"]).tolist()]


def test_a_folder_with_a_folder_of_images_for_each_client(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for client in ("north", "south"):
        for label in ("cat", "dog"):
            (tmp_path / "zoo" / client / label).mkdir(parents=True)
            for number in range(4):
                pixels = rng.integers(0, 256, (6, 6), np.uint8)
                Image.fromarray(pixels).save(tmp_path / "zoo" / client / label / f"{number}.png")
    made = Federation.create(tiny(data__path=str(tmp_path / "zoo"), evaluate="clients"))
    assert (list(made.data.names), made.schema.shape, made.schema.labels) == (
        ["north", "south"],
        (1, 6, 6),
        ("cat", "dog"),
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__path": "nowhere"}, "nowhere is neither here nor"),
        ({"data__path": "all.csv", "data__target": "kind"}, "say with data.client"),
        ({"data__path": "all.csv", "data__target": "kind", "data__client": "ward"}, "no column 'ward'"),
        ({"data__path": "sites"}, "name it as target="),
        ({"data__path": "sites", "data__target": "kind", "data__columns": ["weight"]}, "no column 'weight'"),
        ({"data__path": "empty", "data__target": "kind"}, "has no clients"),
    ],
)
def test_bad_files_are_refused_before_round_1(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tables(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        Federation.create(tiny(evaluate="clients", **changes))


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x.long() % 30).mean(1))


@pytest.mark.parametrize("method", ["dynafed", "fedmix", "fedprox+dynafed"])
def test_methods_that_need_the_samples_gradient_are_refused_by_trying(method: str, tmp_path: Path) -> None:
    tokens = (TRAIN[0] * 3 % 30).astype(np.int64), TRAIN[1]
    for train in (TRAIN, tokens):
        with pytest.raises(UserError, match="needs the gradient of the loss by the samples"):
            dynafed.run(tiny(method=method), model=Long, train=train, test=train, out=tmp_path / "r")
        assert not (tmp_path / "r").exists()


def test_a_last_batch_of_one_sample_gets_a_second_one(tmp_path: Path) -> None:
    plain = [order.tolist() for order in epoch_orders(9, 4, 6, np.random.default_rng(0))]
    filled = [order.tolist() for order in epoch_orders(9, 4, 6, np.random.default_rng(0), pairs=True)]
    assert filled == [[*order, order[0]] for order in plain]

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    clients = [blobs(17, 1), blobs(33, 2), blobs(1, 3)]
    result = dynafed.run(
        tiny(rounds=2, participation=1.0), model=network, clients=clients, test=TEST, out=tmp_path / "r"
    )
    assert result.history[-1]["clients"] == [0, 1, 2]
    with pytest.raises(UserError, match="batch_size = 1"):
        Federation.create(tiny(batch_size=1), model=network, clients=clients, test=TEST)
    assert not Federation.create(tiny(), train=TRAIN, test=TEST).problem.pairs


def test_old_runs_without_model_files_say_so(tmp_path: Path) -> None:
    run_tiny(tmp_path / "r", rounds=1)
    (tmp_path / "r" / "model.json").unlink()
    with pytest.raises(UserError, match=r"has no model\.json"):
        dynafed.load(tmp_path / "r")

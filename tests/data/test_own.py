"""Clients with data of their own: what is taken, when it is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from problems import blobs, tiny
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import dynafed
from dynafed import UserError
from dynafed.data.own import SampleCache, own_clients
from dynafed.data.settings import DataSettings
from dynafed.engine.federation import Federation

CLIENTS = {name: blobs(30 + 5 * number, number) for number, name in enumerate(("mercy", "st-luke", "general"))}
TEST = blobs(60, 9)
NAMES = np.array(["ash", "birch", "cedar", "dogwood"])


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(shape[0], classes)


def federation(clients: Any, test: Any = TEST, **parts: Any) -> Federation:
    return Federation.create(tiny(), model=parts.pop("model", network), clients=clients, test=test, **parts)


def same_samples(made: Federation) -> None:
    """All clients have exactly the samples of `CLIENTS`, in order."""
    for number, (x, y) in enumerate(CLIENTS.values()):
        view = made.client(number)
        assert torch.equal(view.x, torch.from_numpy(x))
        assert made.schema.decode(view.y).tolist() == y.tolist()


class Items(Dataset):
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.x[index]), int(self.y[index])


def frame(x: np.ndarray, y: np.ndarray) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(x, columns=[f"f{i}" for i in range(x.shape[1])]).assign(outcome=y)


def huggingface(x: np.ndarray, y: np.ndarray) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({**{f"f{i}": x[:, i] for i in range(x.shape[1])}, "label": y})


@pytest.mark.parametrize(
    ("wrap", "target"),
    [
        (lambda x, y: (x, y), ""),
        (lambda x, y: (torch.from_numpy(x), torch.from_numpy(y)), ""),
        (lambda x, y: [x.tolist(), y.tolist()], ""),
        (lambda x, y: TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), ""),
        (Items, ""),
        (huggingface, ""),
        (frame, "outcome"),
        (lambda x, y: lambda: (x, y), ""),
        (lambda x, y: lambda: frame(x, y), "outcome"),
    ],
)
def test_each_client_is_what_people_have(wrap: Any, target: str) -> None:
    clients = {name: wrap(*data) for name, data in CLIENTS.items()}
    made = federation(clients, target=target)
    same_samples(made)
    assert (list(made.data.names), made.config.clients, made.schema.classes) == (list(CLIENTS), 3, 4)
    assert [made.data.client_size(client) for client in range(3)] == [30, 35, 40]
    same_samples(federation(list(clients.values()), target=target))


@pytest.mark.parametrize("kind", ["npz", "csv", "parquet"])
def test_each_client_is_a_file(kind: str, tmp_path: Path) -> None:
    clients = {}
    for name, (x, y) in CLIENTS.items():
        clients[name] = tmp_path / f"{name}.{kind}"
        if kind == "npz":
            np.savez(clients[name], x=x, y=y)
        else:
            getattr(frame(x, y), f"to_{kind}")(clients[name], index=False)
    made = federation(clients, target="outcome")
    same_samples(made)
    same_samples(federation([str(path) for path in clients.values()], target="outcome"))


def test_images_by_class_in_folders(tmp_path: Path) -> None:
    rng, expected = np.random.default_rng(0), {}
    for client in ("a", "b"):
        for label in ("cat", "dog"):
            (tmp_path / client / label).mkdir(parents=True)
            for number in range(3):
                pixels = rng.integers(0, 256, (5, 4, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / client / label / f"{number}.png")
                expected[client, label, number] = pixels
    clients = {name: tmp_path / name for name in ("a", "b")}
    made = federation(clients, test=tmp_path / "a", model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(60, 2)))
    assert (made.schema.shape, made.schema.labels, made.schema.dtype) == ((3, 5, 4), ("cat", "dog"), torch.uint8)
    view = made.client(1)
    wanted = torch.from_numpy(expected["b", "dog", 2].transpose(2, 0, 1)).float() / 127.5 - 1
    torch.testing.assert_close(view.x[5], wanted)
    assert made.schema.decode(view.y).tolist() == ["cat"] * 3 + ["dog"] * 3
    (tmp_path / "b" / "dog" / "0.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"0\.png is no image"):
        federation(clients, test=tmp_path / "a", model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(60, 2)))


def test_a_run_without_train_names_its_clients(tmp_path: Path) -> None:
    result = dynafed.run(
        tiny(rounds=2, participation=1.0), model=network, clients=CLIENTS, test=TEST, out=tmp_path / "r"
    )
    assert result.history[0]["client_names"] == list(CLIENTS)
    told = json.loads((tmp_path / "r" / "partition.json").read_text())
    assert told["client_names"] == list(CLIENTS)
    assert [sum(counts) for counts in told["counts"]] == [30, 35, 40]
    with pytest.raises(UserError, match="other data"):
        dynafed.resume(tmp_path / "r", model=network, clients=CLIENTS | {"general": CLIENTS["mercy"]}, test=TEST)
    more = dynafed.resume(tmp_path / "r", model=network, clients=CLIENTS, test=TEST, changes={"rounds": 3})
    assert len(more.history) == 3


def test_the_bits_are_those_of_the_same_rows_of_one_array(tmp_path: Path) -> None:
    x, y = (np.concatenate(parts) for parts in zip(*CLIENTS.values(), strict=True))
    ends = np.cumsum([0, 30, 35, 40])
    rows = {name: range(ends[i], ends[i + 1]) for i, name in enumerate(CLIENTS)}
    masks = [np.isin(np.arange(len(y)), each) for each in rows.values()]
    split = [
        dynafed.run(tiny(), model=network, train=(x, y), test=TEST, clients=each, out=tmp_path / f"{number}")
        for number, each in enumerate((rows, masks))
    ]
    own = dynafed.run(tiny(workers=2), model=network, clients=CLIENTS, test=TEST, out=tmp_path / "own")
    for other in split:
        for name, tensor in own.state.model.items():
            assert torch.equal(tensor, other.state.model[name])
    assert list(split[0].federation.data.names) == list(CLIENTS)


def lazy(number: int, loads: list[int]) -> Any:
    def load() -> tuple[np.ndarray, np.ndarray]:
        loads.append(number)
        return blobs(6, number)

    return load


def test_of_100_000_clients_only_those_that_are_sampled_are_read(tmp_path: Path) -> None:
    loads: list[int] = []
    clients = [lazy(number, loads) for number in range(100_000)]
    config = tiny(rounds=3, clients_per_round=4)
    result = dynafed.run(config, model=network, clients=clients, test=TEST, classes=4, out=tmp_path / "r")
    sampled = [client for record in result.history for client in record["clients"]]
    assert loads == [0, *sampled]


def test_the_cache_is_bounded() -> None:
    loads: list[int] = []
    one = sum(array.nbytes for array in blobs(6, 0))
    clients = own_clients(
        [lazy(number, loads) for number in range(50)], (), DataSettings(classes=4), {}, memory=3 * one
    )
    loads.clear()
    for number in [0, 1, 2, 0, 1, 2, 3, 1, *range(50)]:
        clients.client(number)
        assert clients.cache.used <= 3 * one
    assert loads == [0, 1, 2, 3, 0, 2, *range(3, 50)]
    nothing = SampleCache(0)
    nothing.put(1, clients.read(1))
    assert nothing.get(1) is None


@pytest.mark.parametrize("start", [1, "texts"])
def test_labels_are_texts_or_start_at_1(start: Any, tmp_path: Path) -> None:
    given = {name: (x, NAMES[y] if start == "texts" else y + start) for name, (x, y) in CLIENTS.items()}
    test = (TEST[0], NAMES[TEST[1]] if start == "texts" else TEST[1] + start)
    made = federation(given, test=test)
    assert made.schema.labels == (tuple(NAMES) if start == "texts" else (1, 2, 3, 4))
    own = dynafed.run(tiny(), model=network, clients=given, test=test, out=tmp_path / "own")
    plain = dynafed.run(tiny(), model=network, clients=CLIENTS, test=TEST, out=tmp_path / "plain")
    assert [record["accuracy"] for record in own.history] == [record["accuracy"] for record in plain.history]
    x, y = zip(*given.values(), strict=True)
    arrays = Federation.create(tiny(), train=(np.concatenate(x), np.concatenate(y)), test=test)
    assert (arrays.schema.labels, arrays.schema.classes) == (made.schema.labels, 4)


def test_classes_can_be_given_in_any_order() -> None:
    clients = [(x, NAMES[y]) for x, y in CLIENTS.values()]
    made = federation(clients, test=(TEST[0], NAMES[TEST[1]]), classes=[*NAMES[::-1], "elm"])
    assert made.schema.classes == 5
    assert made.client(0).y.tolist() == (3 - CLIENTS["mercy"][1]).tolist()
    numbers = federation(CLIENTS, classes=7)
    assert (numbers.schema.classes, numbers.schema.labels) == (7, ())


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x).mean(1))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_whole_numbers_stay_whole_numbers(dtype: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = [(rng.integers(0, 20, (24, 5)).astype(dtype), rng.integers(0, 2, 24)) for _ in range(3)]
    result = dynafed.run(tiny(rounds=2), model=Words, clients=tokens, test=tokens[0], out=tmp_path / "r")
    assert result.federation.client(0).x.dtype == torch.int64
    whole = tuple(map(np.concatenate, zip(*tokens, strict=True)))
    arrays = Federation.create(tiny(), model=Words, train=whole, test=whole)
    assert arrays.client(0).x.dtype == torch.int64
    floats = Federation.create(tiny(), train=whole, test=whole)  # the built-in MLP takes no whole numbers
    assert floats.client(0).x.dtype == torch.float32
    with pytest.raises(UserError, match=r"take whole numbers of shape.*nn\.Embedding"):
        federation(tokens, test=tokens[0], model=network)


def test_features_are_scaled_by_what_the_config_says() -> None:
    config = tiny(data__mean=[1.0] * 6, data__std=[2.0] * 6)
    made = Federation.create(config, model=network, clients=CLIENTS, test=TEST)
    torch.testing.assert_close(made.client(0).x, (torch.from_numpy(CLIENTS["mercy"][0]) - 1) / 2)
    with pytest.raises(UserError, match=r"data\.mean has 2 values and data\.std 2"):
        Federation.create(tiny(data__mean=[1, 2], data__std=[1, 2]), model=network, clients=CLIENTS, test=TEST)


@pytest.mark.parametrize(
    ("clients", "parts", "words"),
    [
        (CLIENTS, {"test": None}, "no test samples: pass test="),
        (CLIENTS, {"train": TEST}, "leave it out"),
        ({}, {}, "no clients"),
        (7, {}, "list or a dict"),
        (CLIENTS | {"odd": blobs(9, 1, features=5)}, {}, r"client 'odd' has float32 samples of shape \(5,\).*\(6,\)"),
        ([*CLIENTS.values(), (TEST[0], NAMES[TEST[1]])], {}, "texts and labels that are numbers"),
        ([*CLIENTS.values(), (TEST[0], TEST[1][:4])], {}, "client 3 has 4 labels for 60 samples"),
        (CLIENTS | {"odd": object()}, {}, "client 'odd' is a object: give"),
        (CLIENTS | {"odd": "nowhere.csv"}, {}, "nowhere.csv is neither"),
        (CLIENTS | {"odd": lambda: 1 / 0}, {}, "client 'odd': its function failed: ZeroDivisionError"),
        (CLIENTS, {"classes": 3}, "has the label 3: the 3 classes go from 0 to 2"),
        (CLIENTS, {"shape": (7,)}, r"shape \(6,\), but those of custom are float32 of shape \(7,\)"),
        (CLIENTS, {"model": lambda: nn.Linear(6, 5)}, "5 outputs for a sample, but there are 4 classes"),
        (CLIENTS, {"classes": ["a", "a"]}, "two different labels"),
    ],
)
def test_bad_clients_are_refused_before_round_1(
    clients: Any, parts: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        dynafed.run(tiny(), **{"model": network, "test": TEST} | parts, clients=clients, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_client_that_fails_later_loses_nothing(tmp_path: Path) -> None:
    broken: list[int] = []

    def load() -> Any:
        if broken:
            raise OSError("the disk is gone")
        return blobs(30, 1)

    def stop(record: dict[str, Any]) -> None:
        broken.append(record["round"])

    config, parts = tiny(rounds=4, participation=1.0, data_memory_mb=0), {"clients": [load] * 3, "test": TEST}
    with pytest.raises(UserError, match="client 0: its function failed: OSError: the disk is gone"):
        dynafed.run(config, model=network, classes=4, out=tmp_path / "r", callbacks=[stop], **parts)
    broken.clear()
    again = dynafed.resume(tmp_path / "r", model=network, **parts)
    whole = dynafed.run(config, model=network, classes=4, out=tmp_path / "whole", **parts)
    assert again.history[-1]["loss"] == whole.history[-1]["loss"]

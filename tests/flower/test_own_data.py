"""Nodes that hold nothing but their own data, and a server that has none: the bits of the same files in-process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.cases import CASES, config, timeless
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from nodes import Nodes, Tamper
from problems import TEST, TRAIN

import dynafed
from dynafed import Config, UserError, tree
from dynafed.engine.summary import read_metrics
from dynafed.flower import client_app, server_app
from dynafed.flower.app_config import read_app_config, read_config
from dynafed.flower.own_data import AGREED, node_federation
from dynafed.flower.records import to_record
from dynafed.kernels.build import library

CLIENTS = 4


def split(folder: Path, clients: int = CLIENTS) -> list[Path]:
    """A file for each client, each of another size, and with two of the four classes."""
    folder.mkdir(exist_ok=True)
    files = []
    for client in range(clients):
        x, y = TRAIN
        rows = np.flatnonzero((y == client % 4) | (y == (client + 1) % 4))[client :: clients - client // 2]
        files.append(folder / f"client{client}.npz")
        np.savez(files[-1], x=x[rows], y=y[rows])
    np.savez(folder / "test.npz", x=TEST[0], y=TEST[1])
    return files


def app(chosen: Config, out: Path, **changes: Any) -> dict[str, Any]:
    """A config as Flower's apps get it."""
    flat: dict[str, Any] = {}
    for key, value in chosen.to_dict().items():
        for name, each in value.items() if isinstance(value, Mapping) else [("", value)]:
            full = f"{key}.{name}" if name else key
            flat[full] = str(list(each)) if isinstance(each, list | tuple) else each
    own = {"dataset": "nodes", "clients": CLIENTS, "dynafed-out": str(out), "dynafed-wait": 0.2, "dynafed-timeout": 5.0}
    return flat | own | changes


def federation(run_config: dict[str, Any], data: Mapping[int, str], tamper: Tamper | None = None) -> Nodes:
    """A node for each partition, with data of its own."""
    nodes = Nodes(client_app, len(data), run_config)
    nodes.contexts = {1000 + 7 * number: nodes.context(number, data=each) for number, each in data.items()}
    nodes.tamper = tamper or nodes.tamper
    return nodes


def serve(run_config: dict[str, Any], nodes: Nodes) -> None:
    server_app(nodes, Context(1, 1, {}, RecordDict(), run_config))


def final(path: Path) -> str:
    """The last checkpoint's digest, without claimed numbers of examples: only who doesn't know them keeps those."""
    newest = max((path / "checkpoint").glob("round-*"))
    state = tree.unpack((newest / "state.safetensors").read_bytes())
    return tree.digest({name: tensor for name, tensor in state.items() if name != "norms/examples"})


@pytest.mark.parametrize("case", CASES)
def test_the_same_files_in_process_and_on_nodes_give_the_same_bits(tmp_path: Path, case: str) -> None:
    files, test = split(tmp_path / "files"), str(tmp_path / "files" / "test.npz")
    chosen = config(case)
    given: dict[str, Any] = {"test": test}
    changes: dict[str, Any] = {"data.test": test}
    if chosen.server_samples:
        given["server"] = changes["data.server"] = test
    local = dynafed.run(chosen, clients=files, out=tmp_path / "local", **given)
    run_config = app(chosen, tmp_path / "flower", **changes)
    serve(run_config, federation(run_config, {n: str(file) for n, file in enumerate(files)}))
    assert timeless(read_metrics(tmp_path / "flower")) == timeless(local.history)
    assert final(tmp_path / "flower") == final(local.path)


QUICK: dict[str, Any] = {"method": "scaffold", "rounds": 3, "participation": 1.0, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files, and in `local` what they give in-process."""
    folder = tmp_path_factory.mktemp("shared")
    files = split(folder)
    dynafed.run(quick(), clients=files, test=str(folder / "test.npz"), out=folder / "local")
    return folder


def quick(**changes: Any) -> Config:
    return config("scaffold", **QUICK | changes)


def files_of(folder: Path) -> dict[int, str]:
    return {number: str(folder / f"client{number}.npz") for number in range(CLIENTS)}


def quick_app(shared: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return app(quick(), out, **{"data.test": str(shared / "test.npz")} | changes)


def run(shared: Path, out: Path, nodes: Nodes | None = None, **changes: Any) -> list[dict[str, Any]]:
    run_config = quick_app(shared, out, **changes)
    serve(run_config, nodes or federation(run_config, files_of(shared)))
    return read_metrics(out)


def test_the_folder_says_what_the_samples_are_like_and_a_server_that_is_started_again_asks_nobody(
    tmp_path: Path, shared: Path
) -> None:
    memory = {"dynafed-memory": str(tmp_path / "memory")}
    run(shared, tmp_path / "r", rounds=2, **memory)
    data = Config.load(tmp_path / "r" / "config.toml").to_dict()["data"]
    assert (data["shape"], data["dtype"], data["classes"]) == ([6], "float32", 4)
    asked: list[str] = []

    def tamper(message: Message, reply: Message) -> Message:
        asked.append(message.metadata.message_type)
        return reply

    run_config = quick_app(shared, tmp_path / "r", **memory)
    serve(run_config, federation(run_config, files_of(shared), tamper))
    assert "query.declare" not in asked
    assert final(tmp_path / "r") == final(shared / "local")
    with pytest.raises(UserError, match="'data' decides the run's result"):
        run(shared, tmp_path / "r", **{"data.classes": 7})
    with pytest.raises(UserError, match="dataset = 'nodes': the samples are on Flower's nodes"):
        dynafed.resume(tmp_path / "r")


def load(client: int) -> tuple[np.ndarray, np.ndarray]:
    with np.load(Path(__file__).parent / f"client{client}.npz") as arrays:
        return arrays["x"], arrays["y"]


def test_a_node_may_serve_several_clients_from_a_folder_or_a_function(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(CLIENTS):
        target = tmp_path / f"node{number % 2}" / f"{number // 2}.npz"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((shared / f"client{number}.npz").read_bytes())
    monkeypatch.setattr("test_own_data.__file__", str(shared / "here"))
    for name, data in {
        "folder": {number: str(tmp_path / f"node{number}") for number in range(2)},
        "function": dict.fromkeys(range(2), "test_own_data:load"),
    }.items():
        run_config = quick_app(shared, tmp_path / name, **{"dynafed-num-partitions": 2})
        serve(run_config, federation(run_config, data))
        assert final(tmp_path / name) == final(shared / "local")


def without(shared: Path, out: Path, data: str, **changes: Any) -> tuple[list[dict[str, Any]], Nodes]:
    """A run whose last node has other data; three others are enough."""
    run_config = quick_app(shared, out, **{"dynafed-min-nodes": 3} | changes)
    nodes = federation(run_config, files_of(shared) | {3: data})
    serve(run_config, nodes)
    return read_metrics(out), nodes


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (np.zeros((3, 7), np.float32), [0, 1, 2], r"its samples are float32 of shape \(7,\), those of the run float32"),
        (np.zeros((3, 6), np.uint8), [0, 1, 2], r"its samples are uint8 of shape \(6,\), those of the run float32"),
        (np.zeros((3, 6), np.float32), ["a", "b", "c"], "its labels are not whole numbers, as those of the others"),
        (np.zeros((3, 6), np.float32), [0, 1, 10**6], "labels go up to 1000000, but only"),
        (np.full((3, 6), np.nan, np.float32), [0, 1, 2], "client 3 x has values that are infinite"),
        (np.zeros((3, 6), np.float32), [0, 1], "client 3 has 2 labels for 3 samples"),
    ],
)
def test_the_odd_node_is_named_and_left_out(
    tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture, x: np.ndarray, y: Any, reason: str
) -> None:
    np.savez(tmp_path / "odd.npz", x=x, y=np.array(y))
    records, _ = without(shared, tmp_path / "r", str(tmp_path / "odd.npz"))
    assert [record["clients"] for record in records] == [[0, 1, 2]] * 3
    (line,) = [each.getMessage() for each in caplog.records if "can't take part" in each.getMessage()]
    assert line.startswith("node 1021 can't take part: ")
    assert re.search(reason, line), line


@pytest.mark.parametrize(
    ("node_config", "reason"),
    [
        ({"data": ""}, 'its --node-config needs data="..."'),
        ({"data": "nowhere.npz"}, "nowhere.npz is neither a file nor a folder"),
        ({"data": "test_own_data:CLIENTS"}, "is a int: name a function"),
        ({"data": "no_such_module:f"}, "data = 'no_such_module:f' can't be imported"),
    ],
)
def test_data_that_a_node_does_not_have_are_named(
    tmp_path: Path, shared: Path, node_config: dict[str, Any], reason: str
) -> None:
    run_config = quick_app(shared, tmp_path / "r", clients=1)
    nodes = federation(run_config, {0: ""})
    nodes.contexts = {7: nodes.context(0, **node_config)}
    with pytest.raises(UserError, match=f"0 of 1 nodes .*; node 7: .*{reason}"):
        serve(run_config, nodes)


def test_nodes_that_disagree_one_against_one_end_the_start(tmp_path: Path, shared: Path) -> None:
    np.savez(tmp_path / "odd.npz", x=np.zeros((3, 7), np.float32), y=np.arange(3))
    run_config = quick_app(shared, tmp_path / "r", clients=2)
    data = {0: files_of(shared)[0], 1: str(tmp_path / "odd.npz")}
    with pytest.raises(UserError, match=r"float32 of shape \(6,\) and float32 of shape \(7,\); say what counts with"):
        serve(run_config, federation(run_config, data))
    given = {"data.shape": "[6]", "data.dtype": "float32", "data.classes": 4, "dynafed-min-nodes": 1}
    run_config |= given
    serve(run_config, federation(run_config, data))
    assert [record["clients"] for record in read_metrics(tmp_path / "r")] == [[0]] * 3


def test_a_node_that_comes_later_must_fit_and_changes_nothing(
    tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.savez(tmp_path / "new.npz", x=np.zeros((3, 6), np.float32), y=np.array([0, 1, 4]))
    run_config = quick_app(shared, tmp_path / "r", **{"dynafed-min-nodes": 3})
    nodes = federation(run_config, files_of(shared))
    del nodes.contexts[1021]

    def tamper(message: Message, reply: Message) -> Message:
        late = {"1": str(tmp_path / "new.npz"), "2": files_of(shared)[3]}
        if data := late.get(message.metadata.group_id):
            nodes.contexts[2000 + int(message.metadata.group_id)] = nodes.context(3, data=data)
        return reply

    nodes.tamper = tamper
    serve(run_config, nodes)
    assert [record["clients"] for record in read_metrics(tmp_path / "r")] == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]
    assert "node 2001 can't take part: client 3 has the label 4: the 4 classes go from 0 to 3" in caplog.text


def test_texts_as_labels_are_numbered_alike_everywhere(tmp_path: Path) -> None:
    rng, files = np.random.default_rng(0), {}
    for client, names in enumerate((["owl", "ant"], ["bee", "ant"], ["cat", "owl"], ["ant", "cat"])):
        files[client] = str(tmp_path / f"{client}.npz")
        np.savez(files[client], x=rng.integers(0, 256, (12, 1, 4, 4), np.uint8), y=rng.choice(names, 12))
    chosen = quick(evaluate="clients")
    local = dynafed.run(chosen, clients=list(files.values()), out=tmp_path / "local")
    run_config = app(chosen, tmp_path / "flower")
    serve(run_config, federation(run_config, files))
    same_metrics(tmp_path, local)
    assert Config.load(tmp_path / "flower" / "config.toml").to_dict()["data"]["labels"] == ["ant", "bee", "cat", "owl"]


def test_tables_are_put_together_by_the_names_of_their_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng, plain, mixed = np.random.default_rng(0), [], {}
    for client in range(CLIENTS):
        rows = [{"age": a, "dose": b, "y": int(a > b)} for a, b in rng.normal(size=(12, 2)).round(3)]
        for name, order in (
            ("plain", ["age", "dose", "y"]),
            ("mixed", [["y", "dose", "age"], ["age", "dose", "y"]][client == 0]),
        ):
            lines = [",".join(order), *(",".join(str(row[key]) for key in order) for row in rows)]
            (tmp_path / f"{name}{client}.csv").write_text("\n".join(lines))
        plain.append(tmp_path / f"plain{client}.csv")
        mixed[client] = str(tmp_path / f"mixed{client}.csv")
    (tmp_path / "odd.csv").write_text("age,height,y\n1,2,0\n2,1,1\n")
    chosen = quick(evaluate="clients")
    local = dynafed.run(chosen, clients=plain, out=tmp_path / "local")
    run_config = app(chosen, tmp_path / "flower")
    nodes = federation(run_config, mixed)
    nodes.contexts[7] = nodes.context(0, data=str(tmp_path / "odd.csv"))
    serve(run_config, nodes)
    same_metrics(tmp_path, local)
    assert Config.load(tmp_path / "flower" / "config.toml").to_dict()["data"]["columns"] == ["age", "dose"]
    assert "node 7 can't take part: its columns are others than those of the run, such as 'dose'" in caplog.text


@pytest.mark.skipif(library() is None, reason="needs a C++ compiler")
def test_a_node_computes_on_the_kernels_that_the_server_chose(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config("fedavg@adam", kernels="own", evaluate="clients")
    local = dynafed.run(chosen, clients=list(files_of(shared).values()), out=tmp_path / "local")
    run_config = app(chosen, tmp_path / "flower", kernels="auto")
    agreed = RecordDict({AGREED: ConfigRecord({"schema": "{}", "kernels": "own"})})
    serve(run_config | {"kernels": "own"}, nodes := federation(run_config, files_of(shared)))
    same_metrics(tmp_path, local)
    monkeypatch.setenv("DYNAFED_KERNELS", "torch")
    agreed[AGREED]["schema"] = json.dumps({"shape": [6], "dtype": "float32", "classes": 4})
    with pytest.raises(UserError, match="the run is computed with kernels = 'own', and here they are 'torch'"):
        node_federation(read_config(run_config), read_app_config(run_config), nodes.contexts[1000], agreed)


# Without samples on the server


def same_metrics(tmp_path: Path, local: dynafed.Result) -> None:
    assert timeless(read_metrics(tmp_path / "flower")) == timeless(local.history)
    assert final(tmp_path / "flower") == final(local.path)


@pytest.mark.parametrize("case", ["fedavg", "fedprox+average", "scaffold+dynafed"])
def test_a_server_without_any_samples_evaluates_on_what_the_clients_hold_out(
    tmp_path: Path, shared: Path, case: str
) -> None:
    chosen = config(case, evaluate="clients", holdout=0.3)
    local = dynafed.run(chosen, clients=list(files_of(shared).values()), out=tmp_path / "local")
    run_config = app(chosen, tmp_path / "flower")
    serve(run_config, federation(run_config, files_of(shared)))
    same_metrics(tmp_path, local)
    assert list(local.history[-1]["accuracy_per_client"]) == ["0", "1", "2", "3"]
    assert (tmp_path / "flower" / "report.html").exists()


@pytest.mark.parametrize(("loss", "targets"), [("mse", 1), ("bce", 3)])
def test_numbers_and_labels_are_learned_on_nodes_too(tmp_path: Path, loss: str, targets: int) -> None:
    rng, files = np.random.default_rng(0), {}
    for client in range(CLIENTS):
        x = rng.normal(size=(20 + client, 6)).astype(np.float32)
        y = x[:, :targets] if loss == "mse" else (x[:, :targets] > 0).astype(np.float32)
        files[client] = str(tmp_path / f"{client}.npz")
        np.savez(files[client], x=x, y=y[:, 0] if targets == 1 else y)
    np.savez(tmp_path / "odd.npz", x=x, y=rng.normal(size=(len(x), 7)))
    chosen = config("scaffold", loss=loss, evaluate="clients", model="mlp")
    local = dynafed.run(chosen, clients=list(files.values()), out=tmp_path / "local")
    run_config = app(chosen, tmp_path / "flower")
    nodes = federation(run_config, files)
    nodes.contexts[7] = nodes.context(0, data=str(tmp_path / "odd.npz"))
    serve(run_config, nodes)
    same_metrics(tmp_path, local)


def test_a_lie_about_an_evaluation_leaves_out_one_client(
    tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lies: list[Callable[[RecordDict], None]] = [
        lambda content: content.update(sums=MetricRecord({"samples": 2**41, "loss": 0.0, "correct": 1.0})),
        lambda content: content.update(sums=MetricRecord({"samples": 3, "loss": 0.0, "correct": 4.0})),
        lambda content: content.update(sums=MetricRecord({"samples": 3, "loss": float("nan"), "correct": 1.0})),
        lambda content: content.update(sums=MetricRecord({"samples": 3, "loss": 0.0})),
        lambda content: content.update(confusion=to_record({"confusion": torch.ones(9, 9, dtype=torch.int64)})),
        lambda content: content.update(confusion=to_record({"confusion": -torch.ones(4, 4, dtype=torch.int64)})),
        lambda content: content.update(confusion=to_record({})),
    ]

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "evaluate" and message.metadata.dst_node_id == 1007:
            lies[int(message.metadata.group_id) - 1](reply.content)
        return reply

    run_config = app(quick(evaluate="clients", rounds=len(lies)), tmp_path / "r")
    serve(run_config, federation(run_config, files_of(shared), tamper))
    for record in read_metrics(tmp_path / "r"):
        assert list(record["accuracy_per_client"]) == ["0", "2", "3"]
        assert f"round {record['round']}, evaluation, client 1: its answer can't be read: ValueError" in caplog.text


SOUND: dict[str, Any] = {"shape": [6], "dtype": "float32", "labels": [0, 1], "sizes": [9]}
SOUND |= {"targets": "classes", "outputs": 0, "columns": []}


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"shape": [2**40]}, "its samples' shape is none that can be"),
        ({"shape": [2**20, 2**20]}, "its samples' shape is none that can be"),
        ({"shape": [0]}, "its samples' shape is none that can be"),
        ({"shape": [-6]}, "its samples' shape is none that can be"),
        ({"shape": [1] * 9}, "its samples' shape is none that can be"),
        ({"shape": [True]}, "its samples' shape is none that can be"),
        ({"shape": "6"}, "its samples' shape is none that can be"),
        ({"dtype": "object"}, "of a type that can't be"),
        ({"dtype": 3}, "of a type that can't be"),
        ({"labels": list(range(10_001))}, "its labels must be"),
        ({"labels": [0.5]}, "its labels must be"),
        ({"labels": ["x" * 201]}, "its labels must be"),
        ({"labels": [2**62]}, "its labels must be"),
        ({"labels": ["a\x1b[2J"]}, "its labels must be"),
        ({"labels": [10**9]}, "labels go up to 1000000000"),
        ({"labels": [-1]}, "has the label -1"),
        ({"sizes": [0]}, "its numbers of samples can't be"),
        ({"sizes": [2**41]}, "its numbers of samples can't be"),
        ({"sizes": [9, 9]}, "it has 2 clients, and its partition 0 has others"),
        ({"labels": None}, "its answer can't be read: KeyError"),
        ({"columns": ["a\x1b"]}, "its columns must have short names"),
        ({"targets": "everything"}, "what it has to learn can't be"),
        ({"targets": "numbers", "outputs": 2**30}, "what it has to learn can't be"),
        ({"targets": "numbers", "outputs": 2}, "it has 2 numbers to learn, the others classes"),
    ],
)
def test_a_lie_about_the_data_is_refused_and_nobody_else_notices(
    tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture, lie: dict[str, Any], reason: str
) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        assert message.metadata.dst_node_id != 7 or message.metadata.message_type == "query.declare"
        if message.metadata.dst_node_id == 7:
            said = {key: value for key, value in (SOUND | lie).items() if value is not None}
            reply.content["declaration"] = ConfigRecord(said)
        return reply

    run_config = quick_app(shared, tmp_path / "r")
    nodes = federation(run_config, files_of(shared), tamper)
    nodes.contexts[7] = nodes.context(0, data=files_of(shared)[0])
    serve(run_config, nodes)
    assert final(tmp_path / "r") == final(shared / "local")
    (line,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("node 7 can't take part")]
    assert reason in line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"data.test": ""}, "the server has no test samples: give it some as data.test, or set evaluate = 'clients'"),
        ({"watch": "[1]"}, r"watch = \(1,\) needs samples that are on the nodes: leave it out"),
        ({"server_samples": 5}, "server_samples = 5 needs samples that are on the nodes: give the server some as"),
        ({"data.test": "nowhere.npz"}, "nowhere.npz is neither a file nor a folder"),
    ],
)
def test_what_a_server_without_data_cannot_do_is_said_first(
    tmp_path: Path, shared: Path, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        run(shared, tmp_path / "r", **changes)
    assert not (tmp_path / "r").exists()

"""Every method of ours as a Flower app: the same bits as in-process, whatever happens to nodes, messages and server."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.cases import CASES, PARTS, config, timeless
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from nodes import QUICK, Nodes, Tamper

import dynafed
from dynafed import Config, UserError, tree
from dynafed.callbacks import Callback, Record, RunContext
from dynafed.engine.federation import Federation
from dynafed.engine.summary import read_metrics
from dynafed.errors import WorkerDied
from dynafed.flower import client_app, server_app, wire
from dynafed.flower.app_config import AppConfig, read_app_config, read_config
from dynafed.flower.apps import NodeSide, make_client_app
from dynafed.flower.backend import FlowerBackend
from dynafed.flower.records import to_record

STATEFUL: dict[str, Any] = {"case": "scaffold+dynafed", "client_state": "persistent", "checkpoint_every": 1}


class FlowerFederation:
    """Nodes that outlive the server, as real ones do."""

    def __init__(
        self, nodes: int = 8, folder: Path | None = None, tamper: Tamper | None = None, **settings: Any
    ) -> None:
        self.federation: Federation
        self.nodes = Nodes(make_client_app(lambda context, content: NodeSide(self.federation, folder)), nodes)
        self.nodes.tamper = tamper or self.nodes.tamper
        self.app_config = AppConfig(**{"wait": 0.1, "timeout": 0.1, "num_partitions": nodes} | settings)

    def backend(self, federation: Federation, path: Path) -> FlowerBackend:
        self.federation = federation
        return FlowerBackend(federation, self.app_config, self.nodes)

    def run(
        self, out: Path, case: str = "fedavg", callbacks: Sequence[Callback] = (), **changes: Any
    ) -> dynafed.Result:
        chosen = config(case, engine="flower", **changes)
        return dynafed.run(chosen, out=out, backend=self.backend, callbacks=callbacks, **PARTS)

    def resume(self, out: Path) -> dynafed.Result:
        return dynafed.resume(out, backend=self.backend, **PARTS)


def in_process(out: Path, case: str = "fedavg", **changes: Any) -> dynafed.Result:
    return dynafed.run(config(case, **changes), out=out, **PARTS)


def everything(result: dynafed.Result) -> dict[str, Any]:
    """Checksums of the model and of each method's state; of the clients' memories, those that the checkpoint lists."""
    parts = {"model": result.state.model} | result.state.server
    return {name: tree.digest(part) for name, part in parts.items()} | {"clients": result.state.clients.write_listing()}


class Crash(Callback):
    """Ends the server after a round, without a word to the engine."""

    def __init__(self, round_num: int) -> None:
        self.last = round_num

    def on_round_begin(self, run: RunContext, round_num: int) -> None:
        if round_num == self.last + 1:
            raise SystemExit("crash")


@pytest.mark.parametrize("case", CASES)
def test_it_ends_with_the_same_bits_as_in_process(tmp_path: Path, case: str) -> None:
    local, flower = in_process(tmp_path / "local", case), FlowerFederation().run(tmp_path / "flower", case)
    assert everything(flower) == everything(local)
    assert timeless(flower.history) == timeless(local.history)


@pytest.mark.parametrize(
    "changes",
    [
        {"client_state": "persistent", "optimizer": "adam", "lr": 0.001},
        {"case": "moon", "dropout": 0.3, "stragglers": 0.5, "watch": [1, 2]},
        {"case": "scaffold", "min_survivors": 3, "dropout": 0.5},
    ],
)
def test_with_three_nodes_for_eight_clients_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    local, flower = in_process(tmp_path / "local", **changes), FlowerFederation(3).run(tmp_path / "flower", **changes)
    assert everything(flower) == everything(local)
    assert timeless(flower.history) == timeless(local.history)


# What survives what


@pytest.mark.parametrize("every", [1, 2])
def test_a_server_that_is_started_again_ends_with_the_same_bits(tmp_path: Path, every: int) -> None:
    stateful = STATEFUL | {"checkpoint_every": every}
    local, federation = in_process(tmp_path / "local", **stateful), FlowerFederation()
    with pytest.raises(SystemExit, match="crash"):
        federation.run(tmp_path / "flower", callbacks=[Crash(3)], **stateful)
    assert everything(federation.resume(tmp_path / "flower")) == everything(local)


def test_nodes_that_start_again_remember_what_is_on_their_disk(tmp_path: Path) -> None:
    local, federation = in_process(tmp_path / "local", **STATEFUL), FlowerFederation(folder=tmp_path / "disk")
    with pytest.raises(SystemExit, match="crash"):
        federation.run(tmp_path / "flower", callbacks=[Crash(3)], **STATEFUL)
    assert everything(FlowerFederation(folder=tmp_path / "disk").resume(tmp_path / "flower")) == everything(local)


def test_without_a_disk_they_say_once_what_they_lost_and_start_afresh(tmp_path: Path) -> None:
    everyone = STATEFUL | {"participation": 1.0}
    with pytest.raises(SystemExit, match="crash"):
        FlowerFederation().run(tmp_path / "flower", callbacks=[Crash(2)], **everyone)
    ended = FlowerFederation().resume(tmp_path / "flower")
    assert ended.history[2]["repeats"] == 1  # at first, nobody remembered
    assert ended.history[2]["clients"] == list(range(8))
    assert ended.history[3]["rejected"] == []


def test_of_one_node_that_lost_its_memory_the_update_is_rejected_once(tmp_path: Path) -> None:
    federation = FlowerFederation()
    with pytest.raises(SystemExit, match="crash"):
        federation.run(tmp_path / "flower", callbacks=[Crash(2)], **STATEFUL | {"participation": 1.0})
    node = next(node for node, context in federation.nodes.contexts.items() if context.node_config["partition-id"] == 5)
    federation.nodes.contexts[node] = federation.nodes.context(5)
    ended = federation.resume(tmp_path / "flower")
    assert ended.history[2]["rejected"] == [
        {"client": 5, "reason": "client 5 has lost what it remembered from round 2: it starts afresh next time"}
    ]
    assert ended.history[3]["rejected"] == []


def test_a_node_keeps_only_what_a_checkpoint_may_ask_for(tmp_path: Path) -> None:
    federation = FlowerFederation(folder=tmp_path / "disk")
    federation.run(tmp_path / "flower", "scaffold", participation=1.0, rounds=8, checkpoint_every=1, keep_checkpoints=2)
    for context in federation.nodes.contexts.values():
        client = context.node_config["partition-id"]
        kept = {f"dynafed-{client}-{round_num}" for round_num in (5, 6, 7, 8)}
        assert set(context.state) == kept
        assert {f"dynafed-{file.stem}" for file in (tmp_path / "disk").glob(f"*/{client}-*")} == kept


# What clients send


def spoilt(spoil: Callable[[RecordDict], None], round_num: str = "1", node: int = 1014) -> Tamper:
    """Spoils what client 2 sends in a round."""

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == round_num and message.metadata.dst_node_id == node:
            spoil(reply.content)
        return reply

    return tamper


def nan(content: RecordDict) -> None:
    model = content.array_records["model"].to_torch_state_dict()
    content["model"] = to_record({name: tensor * torch.nan for name, tensor in model.items()})


def other_names(content: RecordDict) -> None:
    content["model"] = to_record({"nobody": torch.zeros(1)})


def other_dtype(content: RecordDict) -> None:
    model = content.array_records["model"].to_torch_state_dict()
    content["model"] = to_record({name: tensor.double() for name, tensor in model.items()})


def no_model(content: RecordDict) -> None:
    del content["model"]


def no_numbers(content: RecordDict) -> None:
    del content["metrics"]


def other_numbers(content: RecordDict) -> None:
    content["metrics"] = MetricRecord({**content.metric_records["metrics"], "examples": 1.5})


def no_time(content: RecordDict) -> None:
    content["metrics"] = MetricRecord({**content.metric_records["metrics"], "seconds": float("nan")})


def garbage(content: RecordDict) -> None:
    content["model"] = ArrayRecord({"x": Array("float32", (1,), "numpy.ndarray", b"garbage")})


def pickled(content: RecordDict) -> None:
    content["model"] = ArrayRecord({"x": Array("object", (1,), "numpy.ndarray", pickle.dumps(print))})


def no_receipt(content: RecordDict) -> None:
    content["state"] = to_record({"round": torch.zeros(3)})


def long_receipt(content: RecordDict) -> None:
    content["state"] = to_record({"round": torch.tensor(1), "checksum": torch.zeros(10_000, dtype=torch.uint8)})


def unknown_record(content: RecordDict) -> None:
    for name in set(content) - {"task"}:
        del content[name]
    content["hello"] = ConfigRecord({"world": 1})


SPOILERS = {
    nan: "holds NaN or infinity",
    other_names: "is missing",
    other_dtype: "has dtype torch.float64",
    no_model: "can't be read: KeyError",
    no_numbers: "can't be read: KeyError",
    other_numbers: "can't be read: ValueError",
    no_time: "can't be read: ValueError: a time that can't be",
    garbage: "can't be read: ValueError",
    pickled: "can't be read: ValueError",
    no_receipt: "can't be read",
    long_receipt: "can't be read: ValueError: a checksum of 20000 digits",
    unknown_record: "can't be read: KeyError",
}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dynafed.Result:
    """A run in which nothing came from client 2 in round 1."""
    federation = FlowerFederation(
        tamper=lambda message, reply: None if message.metadata.dst_node_id == 1014 and is_round_1(message) else reply
    )
    return federation.run(tmp_path_factory.mktemp("without") / "r", participation=1.0, **STATEFUL)


def is_round_1(message: Message) -> bool:
    return message.metadata.group_id == "1"


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
def test_what_is_wrong_is_rejected_with_a_reason_and_leaves_no_trace(
    tmp_path: Path, without: dynafed.Result, spoil: Callable[[RecordDict], None]
) -> None:
    result = FlowerFederation(tamper=spoilt(spoil)).run(tmp_path / "r", participation=1.0, **STATEFUL)
    (rejected,) = result.history[0]["rejected"]
    assert rejected["client"] == 2
    assert SPOILERS[spoil] in rejected["reason"]
    assert result.history[1]["rejected"] == []
    assert everything(result) == everything(without)


def test_no_answer_in_time_is_a_rejection_too(without: dynafed.Result) -> None:
    assert without.history[0]["rejected"] == [{"client": 2, "reason": "no answer within 0.1 seconds"}]


def test_a_round_that_is_repeated_leaves_no_trace_at_the_clients(tmp_path: Path) -> None:
    seen: list[str] = []

    def tamper(message: Message, reply: Message) -> Message | None:
        seen.append(message.metadata.group_id)
        return None if message.metadata.group_id == "2" and seen.count("2") <= 8 else reply

    everyone = STATEFUL | {"participation": 1.0}
    result = FlowerFederation(tamper=tamper).run(tmp_path / "flower", **everyone)
    assert [record["repeats"] for record in result.history] == [0, 1, 0, 0]
    assert everything(result) == everything(in_process(tmp_path / "local", **everyone))


def test_what_a_client_enrols_with_is_checked(tmp_path: Path) -> None:
    def spoil(content: RecordDict) -> None:
        content["setup"] = to_record({"x": torch.zeros(3, 2), "y": torch.zeros(1)})

    result = FlowerFederation(tamper=spoilt(spoil, round_num="0")).run(tmp_path / "r", "fedmix")
    assert result.history[0]["enrolments_rejected"] == 1


# Nodes that come and go


class Leaves(Callback):
    """After rounds 1 and 2, a node leaves and comes back."""

    def __init__(self, nodes: Nodes, node: int) -> None:
        self.nodes, self.node = nodes, node
        self.context: Context

    def on_round_end(self, run: RunContext, record: Record) -> None:
        if record["round"] == 1:
            self.context = self.nodes.contexts.pop(self.node)
        if record["round"] == 2:
            self.nodes.contexts[self.node + 1] = self.context


def test_a_node_that_left_is_missed_and_one_that_comes_is_welcome(tmp_path: Path) -> None:
    federation = FlowerFederation()
    leaves = Leaves(federation.nodes, 1014)
    result = federation.run(tmp_path / "r", "scaffold", callbacks=[leaves], participation=1.0)
    assert result.history[1]["rejected"] == [{"client": 2, "reason": "no node that serves it is connected"}]
    assert result.history[2]["clients"] == list(range(8))


class Emptied(Callback):
    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def on_round_end(self, run: RunContext, record: Record) -> None:
        self.nodes.contexts.clear()


def test_when_all_nodes_are_gone_the_run_can_go_on_later(tmp_path: Path) -> None:
    federation = FlowerFederation()
    with pytest.raises(WorkerDied, match=r"0 of 8 nodes are here after 0.1 seconds.* dynafed resume"):
        federation.run(tmp_path / "r", callbacks=[Emptied(federation.nodes)])
    assert (tmp_path / "r" / "checkpoint" / "round-000001").exists()
    assert everything(FlowerFederation().resume(tmp_path / "r")) == everything(in_process(tmp_path / "local"))


class CutOff(Callback):
    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def on_round_end(self, run: RunContext, record: Record) -> None:
        def broken(message_ids: Any) -> Any:
            raise ConnectionError("nobody there")

        self.nodes.pull_messages = broken  # type: ignore[method-assign]


def test_when_the_superlink_is_gone_the_run_can_go_on_later(tmp_path: Path) -> None:
    federation = FlowerFederation()
    with pytest.raises(WorkerDied, match=r"the SuperLink can't be reached: ConnectionError: nobody.* dynafed resume"):
        federation.run(tmp_path / "r", callbacks=[CutOff(federation.nodes)])
    assert (tmp_path / "r" / "checkpoint" / "round-000001").exists()


def test_when_all_clients_fail_again_and_again_one_line_says_so(tmp_path: Path) -> None:
    def broken(message: Message, context: Context) -> Message:
        raise ZeroDivisionError("division by zero")

    federation = FlowerFederation()
    federation.nodes.app._registered_funcs["train.default"] = broken
    with pytest.raises(WorkerDied, match=r"all clients failed, 3 times in a row; the last .*ZeroDivision"):
        federation.run(tmp_path / "r")


class Strict(FlowerBackend):
    tolerate_failures = False


def test_a_simulation_ends_where_one_client_fails_and_can_go_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = FlowerFederation(tamper=spoilt(no_model, round_num="3"))
    monkeypatch.setattr("test_apps.FlowerBackend", Strict)
    with pytest.raises(WorkerDied, match=r"round 3, client 2: its answer can't be read.* dynafed resume"):
        federation.run(tmp_path / "r", participation=1.0)
    assert (tmp_path / "r" / "checkpoint" / "round-000002").exists()


def test_too_few_nodes(tmp_path: Path) -> None:
    federation = FlowerFederation()
    federation.nodes.contexts = dict(list(federation.nodes.contexts.items())[:2])
    with pytest.raises(UserError, match=r"2 of 8 nodes are here after 0.1 seconds: .*dynafed-min-nodes"):
        federation.run(tmp_path / "r")
    federation.app_config = AppConfig(wait=0.1, timeout=0.1, min_nodes=2)
    assert federation.run(tmp_path / "s", participation=1.0).history[0]["clients"] == [6, 7]


def test_a_node_with_other_data_is_told_apart(tmp_path: Path) -> None:
    federation = FlowerFederation()
    other = Federation.create(config("fedavg", seed=1), **PARTS)
    right = federation.nodes.app
    wrong = make_client_app(lambda context, content: NodeSide(other))
    federation.nodes.app = lambda message, context: (  # type: ignore[assignment]
        wrong if context.node_config["partition-id"] == 3 else right
    )(message, context)
    with pytest.raises(UserError, match=r"7 of 8 nodes .*; node 1021: it has other data, another split or another"):
        federation.run(tmp_path / "r")


# The apps, as Flower calls them

APP: dict[str, Any] = {
    "method": "scaffold+dynafed",
    "rounds": 3,
    "clients": 4,
    "local_steps": 2,
    "mlp.width": 4,
    **QUICK,
    "dynafed-wait": 0.1,
}


def serve(run_config: dict[str, Any], nodes: Nodes | None = None) -> None:
    server_app(nodes or Nodes(client_app, 4, run_config), Context(1, 1, {}, RecordDict(), run_config))


def test_the_apps_read_their_config_and_go_on_where_they_were(tmp_path: Path) -> None:
    own = {key: value for key, value in APP.items() if not key.startswith("dynafed-")}
    local = dynafed.run(Config.load(None, own | {"dynafed.targets": [1]}), out=tmp_path / "local")
    run_config = APP | {"dynafed-out": str(tmp_path / "flower"), "dynafed-memory": str(tmp_path / "disk")}
    serve(run_config | {"rounds": 2})
    serve(run_config)
    records = read_metrics(tmp_path / "flower")
    assert timeless(records) == timeless(local.history)
    final = "checkpoint/round-000003/state.safetensors"
    assert (tmp_path / "flower" / final).read_bytes() == (local.path / final).read_bytes()
    assert {path.name for path in (tmp_path / "flower").iterdir()} >= {path.name for path in local.path.iterdir()} - {
        "clients"  # they are with the nodes
    }
    assert json.loads((tmp_path / "flower" / "summary.json").read_text())["rounds"] == 3
    with pytest.raises(UserError, match="'lr' decides the run's result"):
        serve(run_config | {"lr": 0.5})


def test_a_preset_can_be_changed_and_a_node_has_a_say_in_how() -> None:
    run_config = {"dynafed-config": "demo", "rounds": 3, "watch": "[1, 2]", "dynafed.samples": 20, "device": "cpu"}
    node_config = {"partition-id": 0, "threads": 2, "dynafed-memory": "m", "alpha": 9.0}
    chosen = read_config(run_config, node_config)
    expected = Config.load("demo", {"rounds": 3, "watch": [1, 2], "dynafed.samples": 20})
    assert chosen == expected.replace(engine="flower", threads=2)
    assert read_app_config(run_config, node_config).client_state_folder == Path("m")
    with pytest.raises(UserError, match="unknown key 'dynafed-min-node': did you mean 'dynafed-min-nodes'"):
        read_app_config({"dynafed-min-node": 3})
    with pytest.raises(UserError, match="unknown key 'round': did you mean 'rounds'"):
        read_config({"round": 3})


@pytest.mark.parametrize(
    ("node_config", "line"),
    [
        ({"device": "cuda"}, "device = 'cuda': torch finds none on this machine"),
        ({"partition-id": 9}, "its partition-id = 9 is not below its num-partitions = 4"),
        ({"partition-id": "x"}, "partition-id = 'x' in its --node-config is not a whole number"),
        ({"data_dir": "nowhere"}, "the data folder nowhere doesn't exist"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without")
def test_what_is_wrong_with_a_node_is_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, node_config: dict[str, Any], line: str
) -> None:
    run_config = APP | {"dynafed-out": str(tmp_path / "r")}
    nodes = Nodes(client_app, 4, run_config)
    nodes.contexts = {7: nodes.context(0, **node_config)}
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match=f"0 of 4 nodes .*; node 7: {line}"):
        serve(run_config, nodes)


def test_no_gpu_on_the_server_is_said_in_one_line(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device = 'cuda': torch finds none on this machine; take device = cpu"):
            serve(APP | {"device": "cuda", "dynafed-out": str(tmp_path / "r")})


def test_a_train_request_comes_out_as_it_went_in() -> None:
    broadcast = wire.Broadcast(3, {"w": torch.randn(2, 3)}, {"scaffold": {"c": torch.randn(2)}})
    request = wire.train_request(wire.pack_broadcast(broadcast), 0.25, {})
    wire.add_task(request, 3, 5)
    read, client, work, receipt = wire.read_train_request(request)
    assert (read.round, client, work, receipt) == (3, 5, 0.25, {})
    assert tree.digest(read.model) == tree.digest(broadcast.model)
    assert tree.digest(tree.nest(read.extras)) == tree.digest(tree.nest(broadcast.extras))

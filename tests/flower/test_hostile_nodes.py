"""Nodes that lie about themselves, answer for others or send garbage: refused, named, without effect on the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from google.protobuf.message import DecodeError
from nodes import Nodes
from test_apps import STATEFUL, FlowerFederation, everything, in_process, no_model, spoilt

from dynafed import UserError
from dynafed.callbacks import Callback, Record, RunContext
from dynafed.errors import WorkerDied
from dynafed.flower import wire
from dynafed.flower.node_keys import read_node_keys

LIAR = 7
"""A node number below those of the honest ones, so that it is heard first."""


def claims(partition: Any, partitions: Any, fingerprint: str = "") -> RecordDict:
    known = {"partition": partition, "partitions": partitions, "fingerprint": fingerprint}
    return RecordDict({"node": ConfigRecord({name: value for name, value in known.items() if value is not None})})


class Lying(FlowerFederation):
    """Eight honest nodes, and one that answers the query with `claim`."""

    def __init__(self, claim: RecordDict, **settings: Any) -> None:
        super().__init__(tamper=self.lie, **settings)
        self.claim = claim
        self.nodes.contexts[LIAR] = self.nodes.context(0)
        self.trained: list[int] = []

    def lie(self, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            self.trained.append(message.metadata.dst_node_id)
        if message.metadata.dst_node_id == LIAR and message.metadata.message_type == "query":
            if not (node := self.claim.config_records.get("node", {"fingerprint": "-"}))["fingerprint"]:
                node["fingerprint"] = self.federation.fingerprint
            reply.content = self.claim
        return reply


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (claims(0, 1), "its num-partitions = 1, the server's is 8"),
        (claims(0, 0), "its num-partitions = 0, the server's is 8"),
        (claims(3, -5), "its num-partitions = -5, the server's is 8"),
        (claims(0, 2**62), f"its num-partitions = {2**62}, the server's is 8"),
        (claims(8, 8), "its partition-id = 8 is not one of 0 to 7"),
        (claims(8, None), "its partition-id = 8 is not one of 0 to 7"),
        (claims(-1, 8), "its partition-id = -1 is not one of 0 to 7"),
        (claims(2**62, 8), f"its partition-id = {2**62} is not one of 0 to 7"),
        (claims(10**5000, 8), "its answer can't be read: ValueError"),
        (claims(True, 8), "must be whole numbers"),
        (claims(0, True), "must be whole numbers"),
        (claims(0.5, 8), "must be whole numbers"),
        (claims("0", 8), "must be whole numbers"),
        (claims([0], 8), "must be whole numbers"),
        (claims(None, 8), "its answer can't be read: KeyError"),
        (claims(0, 8, "another"), "it has other data, another split or another network"),
        (RecordDict(), "its answer can't be read: KeyError"),
        (RecordDict({"node": ArrayRecord()}), "its answer can't be read: KeyError"),
        (RecordDict({"failure": ConfigRecord({"reason": "\x1b[2Jno\nround 9 of 9"})}), "?[2Jno"),
        (RecordDict({"failure": ConfigRecord({"reason": " \n"})}), "it gave no reason"),
    ],
)
def test_a_false_claim_is_refused_and_named_and_nobody_else_notices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, claim: RecordDict, reason: str
) -> None:
    federation = Lying(claim)
    with caplog.at_level(logging.WARNING):
        result = federation.run(tmp_path / "flower", rounds=1)
    assert everything(result) == everything(in_process(tmp_path / "local", rounds=1))
    assert LIAR not in federation.trained
    (line,) = [record.getMessage() for record in caplog.records if "can't take part" in record.getMessage()]
    assert line.startswith(f"node {LIAR} can't take part: ")
    assert reason in line
    assert line.isprintable()


def test_a_node_that_never_answers_does_not_block_the_start(tmp_path: Path) -> None:
    federation = FlowerFederation(tamper=lambda message, reply: None if message.metadata.dst_node_id == LIAR else reply)
    federation.nodes.contexts[LIAR] = federation.nodes.context(0)
    assert everything(federation.run(tmp_path / "r")) == everything(in_process(tmp_path / "local"))


def test_many_liars_make_one_line(tmp_path: Path) -> None:
    federation = FlowerFederation()
    federation.nodes.contexts = {node: federation.nodes.context(9, **{"num-partitions": 10}) for node in range(1, 31)}
    with pytest.raises(UserError, match=r"^0 of 8 nodes .*; node 1: its num-partitions = 10.*; and 20 more$"):
        federation.run(tmp_path / "r")


class Intruder(Callback):
    """After round 1, another node claims client 2's partition; after round 2, the honest one leaves."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def on_round_end(self, run: RunContext, record: Record) -> None:
        if record["round"] == 1:
            self.nodes.contexts[LIAR] = self.nodes.context(2)
        if record["round"] == 2:
            del self.nodes.contexts[1014]


def test_nobody_is_displaced_but_a_place_that_is_left_is_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served: list[tuple[str, int]] = []

    def tamper(message: Message, reply: Message) -> Message:
        if "task" in message.content and message.content.config_records["task"]["client"] == 2:
            served.append((message.metadata.group_id, message.metadata.dst_node_id))
        return reply

    federation = FlowerFederation(tamper=tamper)
    with caplog.at_level(logging.WARNING):
        federation.run(tmp_path / "r", callbacks=[Intruder(federation.nodes)], participation=1.0)
    assert served == [("1", 1014), ("2", 1014), ("3", LIAR), ("4", LIAR)]
    assert f"node {LIAR} can't take part: partition 2 is served by node 1014, which came first" in caplog.text


def test_a_node_need_not_know_the_number_of_partitions(tmp_path: Path) -> None:
    federation = FlowerFederation(3)
    for context in federation.nodes.contexts.values():
        del context.node_config["num-partitions"]
    assert everything(federation.run(tmp_path / "r")) == everything(in_process(tmp_path / "local"))


# Replies to something else


class Replay:
    """Client 2 answers round 2 with what `choose` takes from the replies of round 1."""

    def __init__(self, choose: Callable[[dict[int, Message]], Any]) -> None:
        self.choose = choose
        self.replies: dict[int, Message] = {}

    def __call__(self, message: Message, reply: Message) -> Message:
        task = message.content.config_records.get("task")
        if task is not None and task["round"] == 1:
            self.replies[int(str(task["client"]))] = reply
        if task is not None and (task["round"], task["client"]) == (2, 2):
            chosen = self.choose(self.replies)
            if isinstance(chosen, Message):
                return chosen
            reply.content = chosen(reply.content) if callable(chosen) else chosen
        return reply


def changed(**task: Any) -> Callable[[RecordDict], RecordDict]:
    def change(content: RecordDict) -> RecordDict:
        content["task"] = ConfigRecord({**content.config_records["task"], **task})
        return content

    return change


def without_task(content: RecordDict) -> RecordDict:
    del content["task"]
    return content


STATE_LOST = wire.failure_reply("nothing left", state_lost=True)


@pytest.mark.parametrize(
    ("choose", "reason"),
    [
        (lambda replies: replies[2], "its answer is from another node, or to another message"),
        (lambda replies: replies[3], "its answer is from another node, or to another message"),
        (lambda replies: replies[2].content, "its answer is for round 1 and client 2"),
        (lambda replies: replies[3].content, "its answer is for round 1 and client 3"),
        (lambda replies: changed(client=3), "its answer is for round 2 and client 3"),
        (lambda replies: changed(round="\x1b[2J"), "its answer is for round '\\x1b[2J' and client 2"),
        (lambda replies: changed(nonce="0" * 32), "its answer is to another request"),
        (lambda replies: without_task, "its answer doesn't say which round and client it is for"),
        (lambda replies: STATE_LOST, "its answer doesn't say which round and client it is for"),
    ],
)
def test_a_stale_or_foreign_reply_is_rejected_and_leaves_no_trace(
    tmp_path: Path, silent: dict[str, Any], choose: Callable[[dict[int, Message]], Any], reason: str
) -> None:
    result = FlowerFederation(tamper=Replay(choose)).run(tmp_path / "r", participation=1.0, **STATEFUL)
    assert result.history[1]["rejected"] == [{"client": 2, "reason": reason}]
    assert everything(result) == silent


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes of a run in which client 2 doesn't answer in round 2."""

    def tamper(message: Message, reply: Message) -> Message | None:
        return None if (message.metadata.group_id, message.metadata.dst_node_id) == ("2", 1014) else reply

    out = tmp_path_factory.mktemp("silent") / "r"
    return everything(FlowerFederation(tamper=tamper).run(out, participation=1.0, **STATEFUL))


# Replies that Flower can't decode


class Undecodable(Nodes):
    """Pulling a reply of client 2 in round 2 gives, or raises, `found`."""

    found: Any = None
    unreachable = False

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            if (reply.metadata.group_id, reply.metadata.src_node_id) == ("2", 1014):
                self.unreachable = isinstance(self.found, RuntimeError)
                if isinstance(self.found, Exception):
                    raise self.found
                if self.found is not None:
                    return [self.found]
                reply.__dict__["_content"] = Array("float32", (1,), "numpy.ndarray", b"")
        return replies

    def get_node_ids(self) -> Iterable[int]:
        if self.unreachable:
            raise RuntimeError("the run was stopped")
        return super().get_node_ids()


def undecodable(found: Any) -> FlowerFederation:
    federation = FlowerFederation()
    federation.nodes.__class__ = Undecodable
    federation.nodes.__dict__["found"] = found
    return federation


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (DecodeError("Error parsing message"), "its answer can't be read: DecodeError: Error parsing message"),
        (KeyError("ab12"), "its answer can't be read: KeyError: 'ab12'"),
        (ArrayRecord(), "its answer can't be read: AttributeError"),
        (None, "its answer holds no records"),
    ],
)
def test_a_reply_that_flower_can_t_decode_is_a_rejection(
    tmp_path: Path, silent: dict[str, Any], found: Any, reason: str
) -> None:
    result = undecodable(found).run(tmp_path / "r", participation=1.0, **STATEFUL)
    (rejected,) = result.history[1]["rejected"]
    assert rejected["client"] == 2
    assert rejected["reason"].startswith(reason)
    assert everything(result) == silent


@pytest.mark.parametrize("error", [ConnectionError("gone"), RuntimeError("gone")])
def test_a_superlink_that_is_gone_still_ends_the_run(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(WorkerDied, match=r"the SuperLink can't be reached: .* dynafed resume"):
        undecodable(error).run(tmp_path / "r", participation=1.0, **STATEFUL)
    assert (tmp_path / "r" / "checkpoint" / "round-000001").exists()


def test_what_a_failed_node_says_is_one_printable_line(tmp_path: Path) -> None:
    def spoil(content: RecordDict) -> None:
        no_model(content)
        content["failure"] = ConfigRecord({"reason": f"\x1b]0;owned\x07 {'x' * 10**6}\nround 4 of 4", "state-lost": 3})

    result = FlowerFederation(tamper=spoilt(spoil)).run(tmp_path / "r", participation=1.0)
    (rejected,) = result.history[0]["rejected"]
    assert rejected["reason"] == ("?]0;owned? " + "x" * 1000)[:300]


# Keys


def public_keys(count: int) -> list[ec.EllipticCurvePublicKey]:
    return [ec.derive_private_key(number + 2, ec.SECP384R1()).public_key() for number in range(count)]


def ssh(key: ec.EllipticCurvePublicKey) -> str:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


class Keyed(Nodes):
    """Nodes whose public keys the SuperLink knows."""

    keys: dict[int, ec.EllipticCurvePublicKey]

    def get_nodes(self) -> Iterable[NodeInfo]:
        form = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        keys = {node: self.keys[node].public_bytes(*form) if node in self.keys else b"" for node in self.contexts}
        return [NodeInfo(node_id=node, public_key=key) for node, key in keys.items()]


def test_a_key_serves_its_own_partition_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = public_keys(10)
    file = tmp_path / "keys"
    file.write_text("# partition, key\n\n" + "".join(f"{p} {ssh(keys[p])} node {p}\n" for p in range(8)))
    federation = FlowerFederation(node_keys=str(file))
    federation.nodes.__class__ = Keyed
    honest = {node: context.node_config["partition-id"] for node, context in federation.nodes.contexts.items()}
    # The first two claim partition 0 before its own node does: with the key of partition 3, with one that isn't listed.
    federation.nodes.__dict__["keys"] = {node: keys[p] for node, p in honest.items()} | {1: keys[3], 2: keys[9]}
    federation.nodes.contexts |= {node: federation.nodes.context(0) for node in (1, 2, 3)}
    with caplog.at_level(logging.WARNING):
        result = federation.run(tmp_path / "r")
    assert everything(result) == everything(in_process(tmp_path / "local"))
    assert "node 1 can't take part: its public key is bound to partition 3, not to its partition-id = 0" in caplog.text
    assert "node 2 can't take part: its public key is not in the list of dynafed-node-keys" in caplog.text
    assert "node 3 can't take part: its public key is not in the list of dynafed-node-keys" in caplog.text


def test_a_list_of_keys_is_checked(tmp_path: Path) -> None:
    file, (first, second) = tmp_path / "keys", map(ssh, public_keys(2))
    for text, reason in {
        "": "lists no keys",
        f"0 {first}\n8 {second}": "line 2 begins with '8', not with a partition below 8",
        f"-1 {first}": "line 1 begins with '-1'",
        f"² {first}": "line 1 begins with '²'",
        f"{'9' * 5000} {first}": "line 1 begins with '999",
        f"0 {first[:60]}": "line 1 holds no public key in OpenSSH's format",
        "0": "line 1 holds no public key in OpenSSH's format",
        f"0 {first}\n1 {first}": "line 2 binds a key to partition 1 that has another one above",
    }.items():
        file.write_text(text)
        with pytest.raises(UserError, match=reason):
            read_node_keys(file, 8)
    file.write_bytes(b"\xff\xfe")
    for unreadable in (file, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"dynafed-node-keys = .* can't be read"):
            read_node_keys(unreadable, 8)
    file.write_text(f"0 {first}\n0 {second}\n")
    assert list(read_node_keys(file, 8).values()) == [0, 0]  # a spare node

"""The messages between Flower's server app and client app: writer and reader of each, side by side."""

from __future__ import annotations

import math
import secrets
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.app.typing import ConfigRecordValues

from dynafed import tree
from dynafed.engine.client_store import EMPTY_CHECKSUM, LOST, read_receipt, receipt
from dynafed.errors import UserError
from dynafed.flower.records import from_record, to_record
from dynafed.messages import Broadcast, Update
from dynafed.tasks import Tally
from dynafed.tree import Tree

MAX_SAMPLES = 2**40
"""Of one client, at most."""

BroadcastRecords = dict[str, ArrayRecord]


def pack_broadcast(broadcast: Broadcast) -> BroadcastRecords:
    """The part of the train requests that all clients of a round have in common."""
    return {"model": to_record(broadcast.model), "extras": to_record(tree.nest(broadcast.extras))}


def add_task(content: RecordDict, round_num: int, client: int) -> None:
    """Put into a request what its reply must repeat: round, client, and a random number that nobody else knows."""
    content["task"] = ConfigRecord({"round": round_num, "client": client, "nonce": secrets.token_hex(16)})


def copy_task(request: RecordDict, reply: RecordDict) -> None:
    """Repeat a request's task in its reply, if it has one."""
    if (task := request.config_records.get("task")) is not None:
        reply["task"] = task


def check_task(request: RecordDict, reply: RecordDict) -> None:
    """Raise `UserError` unless a reply belongs to this request."""
    expected, task = request.config_records["task"], reply.config_records.get("task")
    if task is None:
        raise UserError("its answer doesn't say which round and client it is for")
    if dict(task) != dict(expected):
        round_num, client = task.get("round"), task.get("client")
        if (round_num, client) == (expected["round"], expected["client"]):
            raise UserError("its answer is to another request")
        raise UserError(f"its answer is for round {round_num!r} and client {client!r}")


def train_request(records: BroadcastRecords, work: float, state: Tree) -> RecordDict:
    """What one client needs to train; `state` is the receipt of the state that it starts from, or that state."""
    return RecordDict({**records, "state": to_record(state), "train": ConfigRecord({"work": work})})


def read_train_request(content: RecordDict) -> tuple[Broadcast, int, float, Tree]:
    """The broadcast, the client, the share of its work that it does, and its state or the receipt of it."""
    task, work = content.config_records["task"], content.config_records["train"]["work"]
    arrays = {name: from_record(record) for name, record in content.array_records.items()}
    broadcast = Broadcast(cast(int, task["round"]), arrays["model"], tree.unnest(arrays["extras"]))
    return broadcast, cast(int, task["client"]), cast(float, work), arrays["state"]


def train_reply(update: Update, state: Tree) -> RecordDict:
    """An update, and the receipt of the client's new state, or that state."""
    metrics: dict[str, int | float | list[int] | list[float]] = {
        "examples": update.examples,
        "steps": update.steps,
        "loss": update.loss,
        "seconds": update.seconds,
        "curve": list(update.curve),
    }
    return RecordDict(
        {
            "model": to_record(update.model),
            "extras": to_record(tree.nest(update.extras)),
            "state": to_record(state),
            "metrics": MetricRecord(metrics),
        }
    )


def read_train_reply(content: RecordDict, client: int, receipts: bool) -> tuple[Update, Tree]:
    """The inverse of `train_reply`; raises any exception if the client sent something else.

    With `receipts`, a state must be the receipt of one.
    """
    arrays = {name: from_record(content.array_records[name]) for name in ("model", "extras", "state")}
    metrics = content.metric_records["metrics"]
    examples, steps, loss = (metrics[name] for name in ("examples", "steps", "loss"))
    curve, seconds = metrics["curve"], float(cast(float, metrics["seconds"]))
    if type(examples) is not int or type(steps) is not int or not isinstance(curve, list):
        raise ValueError("numbers of another kind")
    if not 0 <= seconds < math.inf:
        raise ValueError("a time that can't be")
    update = Update(
        client=client,
        model=arrays["model"],
        examples=examples,
        steps=steps,
        loss=float(cast(float, loss)),
        seconds=seconds,
        extras=tree.unnest(arrays["extras"]),
        curve=tuple(curve),
    )
    if arrays["state"] and receipts:
        read_receipt(arrays["state"])
    return update, arrays["state"]


def failure_reply(reason: str, state_lost: bool = False) -> RecordDict:
    """The reply of a client that can't do what was requested; `state_lost` if it doesn't have the requested state."""
    return RecordDict({"failure": ConfigRecord({"reason": reason, "state-lost": state_lost})})


def failure_reason(content: RecordDict) -> str | None:
    """The reason, if the reply is a failure."""
    record = content.config_records.get("failure")
    return None if record is None else str(record["reason"])


def failure_receipt(content: RecordDict) -> Tree:
    """The receipt that tells the server to forget a lost state; empty for any other reply."""
    record = content.config_records.get("failure")
    return receipt(LOST, EMPTY_CHECKSUM) if record is not None and record.get("state-lost") is True else {}


def node_info_reply(partition: int, num_partitions: int | None, fingerprint: str = "") -> RecordDict:
    """What a node says about itself: its partition, of how many if it knows, and the checksum of data and network."""
    node: dict[str, int | str] = {"partition": partition, "fingerprint": fingerprint}
    if num_partitions is not None:
        node["partitions"] = num_partitions
    return RecordDict({"node": ConfigRecord(cast(dict[str, ConfigRecordValues], node))})


def read_node_info(content: RecordDict) -> tuple[int, int | None]:
    """The partition and the number of partitions; raises any exception if the node sent something else."""
    node = content.config_records["node"]
    partition, num_partitions = node["partition"], node.get("partitions")
    # Not isinstance: True is an int, too.
    if type(partition) is not int or type(num_partitions) not in (int, type(None)):
        raise UserError("its partition-id and num-partitions must be whole numbers")
    return partition, cast(int | None, num_partitions)


def read_fingerprint(content: RecordDict) -> object:
    """The checksum in what a node says about itself."""
    return content.config_records["node"]["fingerprint"]


def read_setup_request(content: RecordDict) -> int:
    """The client whose setup is requested."""
    return cast(int, content.config_records["task"]["client"])


def setup_reply(tensors: Tree) -> RecordDict:
    """What a client sends once, before round 1."""
    return RecordDict({"setup": to_record(tensors)})


def read_setup_reply(content: RecordDict) -> Tree:
    """The inverse of `setup_reply`."""
    return from_record(content.array_records["setup"])


def evaluate_request(model: Tree) -> RecordDict:
    """What one client needs to evaluate a model on what it holds out."""
    return RecordDict({"model": to_record(model)})


def read_evaluate_request(content: RecordDict) -> tuple[Tree, int]:
    """The model and the client."""
    return from_record(content.array_records["model"]), cast(int, content.config_records["task"]["client"])


def evaluate_reply(tally: Tally) -> RecordDict:
    """What a model does on a client's samples, in sums."""
    confusion = {} if tally.confusion is None else {"confusion": tally.confusion}
    sums = {name: float(value) for name, value in tally.sums.items()}
    return RecordDict({"sums": MetricRecord({"samples": tally.samples, **sums}), "confusion": to_record(confusion)})


def read_evaluate_reply(content: RecordDict, expected: Tally) -> Tally:
    """The inverse of `evaluate_reply`; raises any exception for another form than that of `expected`, of no samples."""
    sums = dict(content.metric_records["sums"])
    samples = sums.pop("samples")
    confusion = from_record(content.array_records["confusion"]).get("confusion")
    if type(samples) is not int or not 0 <= samples <= MAX_SAMPLES:
        raise ValueError("a number of samples that can't be")
    if not samples:
        return expected
    if sums.keys() != expected.sums.keys() or not all(type(x) is float and math.isfinite(x) for x in sums.values()):
        raise ValueError("sums that can't be")
    if not 0 <= cast(float, sums.get("correct", 0.0)) <= samples:
        raise ValueError("more right than there are samples")
    if (confusion is None) != (expected.confusion is None):
        raise ValueError("a table of classes where there should be none, or none where there should be one")
    if confusion is not None and expected.confusion is not None:
        alike = confusion.shape == expected.confusion.shape and confusion.dtype == expected.confusion.dtype
        if not alike or confusion.min() < 0 or confusion.max() > samples or confusion.sum() != samples:
            raise ValueError("a table of classes that can't be")
    return Tally(samples, cast(dict[str, float], sums), confusion)

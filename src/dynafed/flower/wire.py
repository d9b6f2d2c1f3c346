"""The messages between Flower's server app and client app: writer and reader of each, side by side."""

from __future__ import annotations

import math
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from dynafed import tree
from dynafed.engine.memory import LOST, NOTHING, read_receipt, receipt
from dynafed.flower.records import from_record, to_record
from dynafed.messages import Broadcast, Update
from dynafed.tree import Tree

BroadcastRecords = dict[str, ArrayRecord]


def pack_broadcast(broadcast: Broadcast) -> BroadcastRecords:
    """The part of the train requests that all clients of a round have in common."""
    return {"model": to_record(broadcast.model), "extras": to_record(tree.nest(broadcast.extras))}


def train_request(
    records: BroadcastRecords, round_num: int, client: int, work: float, state_receipt: Tree
) -> RecordDict:
    """One client's task in a round; `state_receipt` says which of its states it starts from."""
    task = ConfigRecord({"round": round_num, "client": client, "work": work})
    return RecordDict({**records, "receipt": to_record(state_receipt), "task": task})


def read_train_request(content: RecordDict) -> tuple[Broadcast, int, float, Tree]:
    """The broadcast, the client, the share of its work that it does, and the receipt of its state."""
    task = content.config_records["task"]
    arrays = {name: from_record(record) for name, record in content.array_records.items()}
    broadcast = Broadcast(cast(int, task["round"]), arrays["model"], tree.unnest(arrays["extras"]))
    return broadcast, cast(int, task["client"]), cast(float, task["work"]), arrays["receipt"]


def train_reply(update: Update, state_receipt: Tree) -> RecordDict:
    """An update, and the receipt of the client's new state."""
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
            "receipt": to_record(state_receipt),
            "metrics": MetricRecord(metrics),
        }
    )


def read_train_reply(content: RecordDict, client: int) -> tuple[Update, Tree]:
    """The inverse of `train_reply`; raises any exception if the client sent something else."""
    arrays = {name: from_record(content.array_records[name]) for name in ("model", "extras", "receipt")}
    metrics = content.metric_records["metrics"]
    examples, steps, loss = (metrics[name] for name in ("examples", "steps", "loss"))
    curve, seconds = metrics["curve"], float(cast(float, metrics["seconds"]))
    if not (isinstance(examples, int) and isinstance(steps, int) and isinstance(curve, list)):
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
    if arrays["receipt"]:
        read_receipt(arrays["receipt"])
    return update, arrays["receipt"]


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
    return receipt(LOST, NOTHING) if record is not None and record.get("state-lost") is True else {}


def node_info_reply(partition: int, partitions: int, fingerprint: str) -> RecordDict:
    """What a node says about itself: which part of the data it has, of how many, and of which data."""
    return RecordDict(
        {"node": ConfigRecord({"partition": partition, "partitions": partitions, "fingerprint": fingerprint})}
    )


def read_node_info(content: RecordDict) -> tuple[int, int, str]:
    """The inverse of `node_info_reply`."""
    node = content.config_records["node"]
    return int(cast(int, node["partition"])), int(cast(int, node["partitions"])), str(node["fingerprint"])


def setup_request(client: int) -> RecordDict:
    """Asks for what a client sends once, before round 1."""
    return RecordDict({"task": ConfigRecord({"client": client})})


def read_setup_request(content: RecordDict) -> int:
    """The inverse of `setup_request`."""
    return cast(int, content.config_records["task"]["client"])


def setup_reply(tensors: Tree) -> RecordDict:
    """What a client sends once, before round 1."""
    return RecordDict({"setup": to_record(tensors)})


def read_setup_reply(content: RecordDict) -> Tree:
    """The inverse of `setup_reply`."""
    return from_record(content.array_records["setup"])

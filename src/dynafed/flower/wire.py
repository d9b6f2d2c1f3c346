"""What crosses between Flower's server app and client app: both ends of each message, side by side."""

from __future__ import annotations

import math
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from dynafed import tree
from dynafed.engine.memory import LOST, NOTHING, read_receipt, receipt
from dynafed.flower.records import from_record, to_record
from dynafed.messages import Broadcast, Update
from dynafed.tree import Tree

Parcel = dict[str, ArrayRecord]


def pack(broadcast: Broadcast) -> Parcel:
    """The part of the orders that all clients of a round have in common."""
    return {"model": to_record(broadcast.model), "extras": to_record(tree.nest(broadcast.extras))}


def order(parcel: Parcel, round: int, client: int, work: float, memory: Tree) -> RecordDict:
    """What one client is to do; `memory` is the receipt of what it should remember."""
    task = ConfigRecord({"round": round, "client": client, "work": work})
    return RecordDict({**parcel, "memory": to_record(memory), "task": task})


def read_order(content: RecordDict) -> tuple[Broadcast, int, float, Tree]:
    """The broadcast, the client, the share of its work that it does, and the receipt."""
    task = content.config_records["task"]
    arrays = {name: from_record(record) for name, record in content.array_records.items()}
    broadcast = Broadcast(cast(int, task["round"]), arrays["model"], tree.unnest(arrays["extras"]))
    return broadcast, cast(int, task["client"]), cast(float, task["work"]), arrays["memory"]


def answer(update: Update, memory: Tree) -> RecordDict:
    """An update, and the receipt of what the client remembers now."""
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
            "memory": to_record(memory),
            "metrics": MetricRecord(metrics),
        }
    )


def refusal(reason: str, lost: bool = False) -> RecordDict:
    """What a client sends that can't do what it was told to; `lost` if it doesn't remember what it should."""
    return RecordDict({"refusal": ConfigRecord({"reason": reason, "lost": lost})})


def refused(content: RecordDict) -> str | None:
    """The reason, if it is a refusal."""
    record = content.config_records.get("refusal")
    return None if record is None else str(record["reason"])


def loss(content: RecordDict) -> Tree:
    """The receipt that a refusal stands for, if its reason is a lost memory."""
    record = content.config_records.get("refusal")
    return receipt(LOST, NOTHING) if record is not None and record.get("lost") is True else {}


def read_answer(content: RecordDict, client: int) -> tuple[Update, Tree]:
    """The inverse of `answer`; raises whatever it likes if the client sent something else."""
    arrays = {name: from_record(content.array_records[name]) for name in ("model", "extras", "memory")}
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
    if arrays["memory"]:
        read_receipt(arrays["memory"])
    return update, arrays["memory"]


def introduction(partition: int, partitions: int, fingerprint: str) -> RecordDict:
    """What a node says about itself: which part of the data it has, of how many, and of which data."""
    return RecordDict(
        {"node": ConfigRecord({"partition": partition, "partitions": partitions, "fingerprint": fingerprint})}
    )


def read_introduction(content: RecordDict) -> tuple[int, int, str]:
    """The inverse of `introduction`."""
    node = content.config_records["node"]
    return int(cast(int, node["partition"])), int(cast(int, node["partitions"])), str(node["fingerprint"])


def whose(client: int) -> RecordDict:
    """The question what a client sends once, before round 1."""
    return RecordDict({"task": ConfigRecord({"client": client})})


def read_whose(content: RecordDict) -> int:
    """The inverse of `whose`."""
    return cast(int, content.config_records["task"]["client"])


def enrolment(sent: Tree) -> RecordDict:
    """What a client sends once, before round 1."""
    return RecordDict({"enrolment": to_record(sent)})


def read_enrolment(content: RecordDict) -> Tree:
    """The inverse of `enrolment`."""
    return from_record(content.array_records["enrolment"])

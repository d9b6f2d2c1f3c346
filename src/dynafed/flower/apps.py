"""Every method of ours on Flower: a client app and a server app that read a dynafed config from the app's own.

They call the same `local_update` and the same rounds as the in-process engine, and end with the same weights.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from dynafed.config import Config
from dynafed.engine.files import checksum
from dynafed.engine.local import local_update
from dynafed.engine.plan import Plan
from dynafed.engine.run import Progress, Record, resume, run
from dynafed.errors import Interrupted, UserError
from dynafed.execution import EXECUTION
from dynafed.flower import wire
from dynafed.flower.fleet import Fleet
from dynafed.flower.node import Lost, NodeMemory
from dynafed.flower.settings import config_of, settings_of
from dynafed.path import keep_freed_memory

log = logging.getLogger("flwr.dynafed")

Setting = Callable[[Context], tuple[Plan, Path | None]]
"""What a client app works on, and where on the disk its clients' memories are, if they are."""


def make_client_app(setting: Setting) -> ClientApp:
    """A client app that trains the clients which the server asks for."""
    app = ClientApp()

    def told(handle: Callable[[Plan, Path | None, Message, Context], RecordDict]) -> Callable[..., Message]:
        """Answer with what `handle` returns, or with one line about why it can't."""

        def answered(message: Message, context: Context) -> Message:
            try:
                plan, folder = setting(context)
                torch.set_num_threads(plan.config.threads)
                keep_freed_memory()
                content = handle(plan, folder, message, context)
            except (UserError, Lost) as error:
                log.error("%s", error)
                content = wire.refusal(str(error), lost=isinstance(error, Lost))
            return Message(content, reply_to=message)

        return answered

    app.query()(told(_introduce))
    app.query("enrol")(told(_enrol))
    app.train()(told(_train))
    return app


def _introduce(plan: Plan, folder: Path | None, message: Message, context: Context) -> RecordDict:
    try:
        partition, partitions = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    except (KeyError, ValueError):
        raise UserError("its --node-config needs partition-id=N and num-partitions=N") from None
    if not 0 <= partition < partitions:
        raise UserError(f"its partition-id = {partition} is not below its num-partitions = {partitions}")
    return wire.introduction(partition, partitions, plan.fingerprint)


def _enrol(plan: Plan, folder: Path | None, message: Message, context: Context) -> RecordDict:
    return wire.enrolment(plan.methods.client.enrol(plan, wire.read_whose(message.content)))


def _train(plan: Plan, folder: Path | None, message: Message, context: Context) -> RecordDict:
    broadcast, client, work, receipt = wire.read_order(message.content)
    memory = NodeMemory(client, context.state, folder)
    memory.forget(receipt, before=broadcast.round - 1 - plan.config.checkpoint_every * plan.config.keep_checkpoints)
    update, kept = local_update(plan, broadcast, client, memory.recall(receipt), work)
    return wire.answer(update, memory.keep(broadcast.round, kept))


def _configured(context: Context) -> tuple[Plan, Path | None]:
    plan = _plan(config_of(context.run_config, context.node_config).to_toml())
    folder = settings_of(context.run_config, context.node_config).memory_folder
    return plan, folder / _identity(plan) if folder else None


@lru_cache(maxsize=1)
def _plan(config: str) -> Plan:
    """A process that trains several clients, one after the other, reads its data once."""
    return Plan.make(Config.from_dict(tomllib.loads(config)))


def _identity(plan: Plan) -> str:
    """The name of the computation: equal for runs that come to the same result."""
    deciding = {key: value for key, value in plan.config.to_dict().items() if key not in EXECUTION | {"rounds"}}
    return checksum(f"{sorted(deciding.items())} {plan.fingerprint}".encode())


client_app = make_client_app(_configured)
"""Trains the clients of a Flower node, as the app's config says."""

server_app = ServerApp()
"""Runs the rounds, as the app's config says, and leaves a run's files in `dynafed-out`."""


@server_app.main()
def _serve(grid: Grid, context: Context) -> None:
    settings, config = settings_of(context.run_config), config_of(context.run_config)

    def crew(plan: Plan, path: Path) -> Fleet:
        log.info("the run's files are in %s", path.absolute())
        return Fleet(plan, settings, grid)

    out = Path(settings.out).expanduser() if settings.out else None
    common: dict[str, Any] = {"progress": _Log(), "crew": crew}
    try:
        if out and (out / "config.toml").exists():
            before, now = Config.load(out / "config.toml").to_dict(), config.to_dict()
            changes = {key: value for key, value in now.items() if value != before.get(key)}
            result = resume(out, changes=changes, **common)
        else:
            result = run(config, out=out, **common)
    except Interrupted as stopped:
        raise RuntimeError(str(stopped)) from None  # Flower reports errors, but not interrupts
    log.info("done: accuracy %.2f %% over the last rounds", 100 * result.final_accuracy)


class _Log(Progress):
    """A line a round in Flower's log."""

    def round(self, record: Record, config: Config) -> None:
        line = f"round {record['round']} of {config.rounds}: {len(record['clients'])} clients"
        if "accuracy" in record:
            line += f", accuracy {100 * record['accuracy']:.2f} %"
        log.info("%s", line + "".join(f"; client {each['client']}: {each['reason']}" for each in record["rejected"]))

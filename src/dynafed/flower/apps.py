"""Every method of ours on Flower: a client app and a server app that read a dynafed config from the app's own.

They call the same `local_update` and the same rounds as the in-process engine, and end with the same weights.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from dynafed.callbacks import Callback, Record, RunContext
from dynafed.config import Config
from dynafed.data.spec import NODES
from dynafed.engine.evaluation import evaluate_part
from dynafed.engine.federation import Federation
from dynafed.engine.files import checksum
from dynafed.engine.local import local_update
from dynafed.engine.run import resume, run
from dynafed.engine.trust import load_run_config
from dynafed.errors import Interrupted, UserError
from dynafed.execution import keep_freed_memory
from dynafed.flower import own_data, wire
from dynafed.flower.agreement import agreed_clients
from dynafed.flower.app_config import AppConfig, node_partition, read_app_config, read_config
from dynafed.flower.backend import FlowerBackend
from dynafed.flower.client_store import NodeClientStore, StateLost
from dynafed.flower.declaration import write_declaration

log = logging.getLogger("flwr.dynafed")


@dataclass(frozen=True)
class NodeSide:
    """What a client app works on."""

    federation: Federation
    folder: Path | None = None
    """Where its clients' states survive a restart."""
    sends_states: bool = False
    """Whether the clients' states travel with the messages; else they stay here, and receipts do."""


ResolveNode = Callable[[Context, RecordDict], NodeSide]
"""Returns what a client app works on, given its context and a request."""


def make_client_app(resolve: ResolveNode) -> ClientApp:
    """A client app that trains the clients that the server requests."""
    app = ClientApp()

    def handler(handle: Callable[[NodeSide, Message, Context], RecordDict]) -> Callable[..., Message]:
        def resolved(message: Message, context: Context) -> RecordDict:
            node = resolve(context, message.content)
            torch.set_num_threads(node.federation.config.threads)
            keep_freed_memory()
            return handle(node, message, context)

        return _replies(resolved)

    app.query()(handler(_node_info))
    app.query("declare")(_replies(_declare))
    app.query("setup")(handler(_setup))
    app.train()(handler(_train))
    app.evaluate()(handler(_evaluate))
    return app


def _replies(handle: Callable[[Message, Context], RecordDict]) -> Callable[[Message, Context], Message]:
    """Replies with what `handle` returns, or with one line about why it can't."""

    def reply(message: Message, context: Context) -> Message:
        try:
            content = handle(message, context)
        except (UserError, StateLost) as error:
            log.error("%s", error)
            content = wire.failure_reply(str(error), state_lost=isinstance(error, StateLost))
        wire.copy_task(message.content, content)
        return Message(content, reply_to=message)

    return reply


def _declare(message: Message, context: Context) -> RecordDict:
    config, app_config = read_config(context.run_config, context.node_config), _app_config(context)
    content = wire.node_info_reply(*node_partition(context))
    content["declaration"] = write_declaration(own_data.node_declaration(config, app_config, context))
    return content


def _node_info(node: NodeSide, message: Message, context: Context) -> RecordDict:
    return wire.node_info_reply(*node_partition(context), node.federation.fingerprint)


def _setup(node: NodeSide, message: Message, context: Context) -> RecordDict:
    federation = node.federation
    method = federation.methods.sets_up
    if method is None:
        raise UserError(f"method = '{federation.config.method}' has no set-up of its clients")
    return wire.setup_reply(method.setup_client(federation.client(wire.read_setup_request(message.content))))


def _train(node: NodeSide, message: Message, context: Context) -> RecordDict:
    broadcast, client, work, requested = wire.read_train_request(message.content)
    side, view = node.federation.client_side, node.federation.client(client)
    if node.sends_states:
        return wire.train_reply(*local_update(side, view, broadcast, requested, work))
    store = NodeClientStore(client, context.state, node.folder)
    store.prune(requested, before=broadcast.round - 1 - side.config.checkpoint_every * side.config.keep_checkpoints)
    update, state = local_update(side, view, broadcast, store.load(requested), work)
    return wire.train_reply(update, store.save(broadcast.round, state))


def _evaluate(node: NodeSide, message: Message, context: Context) -> RecordDict:
    model, client = wire.read_evaluate_request(message.content)
    return wire.evaluate_reply(evaluate_part(node.federation, model, "client", client, 0))


def _from_config(context: Context, content: RecordDict) -> NodeSide:
    config, app_config = read_config(context.run_config, context.node_config), _app_config(context)
    if config.dataset == NODES:
        federation = own_data.node_federation(config, app_config, context, content)
    else:
        federation = _load(config.to_toml())
    folder = app_config.client_state_folder
    return NodeSide(federation, folder / _run_key(federation) if folder else None)


def _app_config(context: Context) -> AppConfig:
    return read_app_config(context.run_config, context.node_config)


@lru_cache(maxsize=1)
def _load(config: str) -> Federation:
    """Cached: a process that trains several clients, one after the other, reads its data once."""
    return Federation.create(Config.from_dict(tomllib.loads(config)))


def _run_key(federation: Federation) -> str:
    """Equal for runs that come to the same result."""
    deciding = {key: value for key, value in federation.config.deciding().items() if key != "rounds"}
    return checksum(f"{sorted(deciding.items())} {federation.fingerprint}".encode())


client_app = make_client_app(_from_config)
"""Trains the clients of a Flower node, as the app's config says."""

server_app = ServerApp()
"""Runs the rounds, as the app's config says, and leaves a run's files in `dynafed-out`."""


@server_app.main()
def _serve(grid: Grid, context: Context) -> None:
    app_config, config = read_app_config(context.run_config), read_config(context.run_config)
    out = Path(app_config.out).expanduser() if app_config.out else None
    before = load_run_config(out, config) if out and (out / "config.toml").exists() else None
    given: dict[str, Any] = {}
    refused: dict[int, str] = {}
    if config.dataset == NODES:
        config, given["clients"], refused = agreed_clients(config, app_config, grid, before)

    def backend(federation: Federation, path: Path) -> FlowerBackend:
        log.info("the run's files are in %s", path.absolute())
        own = config.dataset == NODES
        records = {own_data.AGREED: own_data.agreed_record(federation)} if own else {}
        return FlowerBackend(federation, app_config, grid, records, refused)

    given |= {"callbacks": [_RoundLog()], "backend": backend, "progress": False}
    try:
        if out and before:
            earlier = before.to_dict()
            changes = {key: value for key, value in config.to_dict().items() if value != earlier.get(key)}
            result = resume(out, changes=changes, trust=config, **given)
        else:
            result = run(config, out=out, **given)
    except Interrupted as stopped:
        raise RuntimeError(str(stopped)) from None  # Flower reports errors, but not interrupts
    log.info("done: %r", result)


class _RoundLog(Callback):
    """Writes one line per round to Flower's log."""

    def on_round_end(self, run: RunContext, record: Record) -> None:
        line = f"round {record['round']} of {run.config.rounds}: {len(record['clients'])} clients"
        if "accuracy" in record:
            line += f", accuracy {100 * record['accuracy']:.2f} %"
        log.info("%s", line + "".join(f"; client {each['client']}: {each['reason']}" for each in record["rejected"]))

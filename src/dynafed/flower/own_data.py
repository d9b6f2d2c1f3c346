"""Runs whose nodes have data of their own: a node reads its clients' samples, and the server has none of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, RecordDict

from dynafed.config import Config
from dynafed.data.files import file_clients, pinned_columns
from dynafed.data.own import OwnClients, client_title
from dynafed.data.readers import is_client_path, read
from dynafed.data.schema import Samples, Schema
from dynafed.data.settings import DataSettings
from dynafed.engine.federation import Federation, resolve_device
from dynafed.errors import UserError
from dynafed.flower.app_config import AppConfig, node_partition
from dynafed.flower.declaration import Declaration, declare
from dynafed.registry import Registry, required_arguments
from dynafed.seeds import Seeds
from dynafed.tasks import config_targets

AGREED = "agreed"
"""The record of a request that says what was agreed on before round 1."""

FUNCTIONS: Registry[Any] = Registry("function", {}, key="data")
"""Functions that return a node's samples; imported by their place in a module."""


@dataclass(eq=False)
class NodeClients(OwnClients):
    """Clients on Flower's nodes: a node has the samples of its own, the server those of no client."""

    mean_size: int = 0
    """About how many samples a client has; only the server needs it."""

    @classmethod
    def of(
        cls, config: Config, sources: Mapping[int, Any], splits: Mapping[str, Samples], mean_size: int = 0
    ) -> NodeClients:
        """All clients of a run whose config has its schema; `sources` are those that are here."""
        settings = config.section("data", DataSettings)
        everyone = [sources.get(client, partial(_elsewhere, client)) for client in range(config.clients)]
        memory = config.data_memory_mb * 2**20
        return cls(everyone, (), _schema(config), settings.table_columns(), splits, memory, mean_size=mean_size)

    def mean_client_size(self) -> int:
        """As the nodes declared it."""
        return self.mean_size

    def fingerprint(self) -> Sequence[np.ndarray]:
        """What the samples look like: server and nodes have nothing else in common."""
        return [np.frombuffer(str(self.schema).encode(), np.uint8)]


def _elsewhere(client: int) -> None:
    raise UserError(f"the samples of client {client} are on a node of its own")


def _schema(config: Config) -> Schema:
    """The schema that section `data` has once it is agreed on."""
    settings = config.section("data", DataSettings)
    given, targets = settings.given_classes(), config_targets(config) or "classes"
    labels = tuple(given) if isinstance(given, Sequence) else ()
    return Schema(
        "nodes",
        settings.shape,
        getattr(torch, settings.dtype),
        len(labels) or settings.classes,
        settings.mean,
        settings.std,
        tuple(map(str, labels)),
        labels,
        targets,
        flat=targets != "classes" and settings.classes == 1,
    )


def schema_settings(schema: Schema, columns: Sequence[str]) -> dict[str, Any]:
    """A schema as keys of section `data`, and the columns that the samples are made of."""
    return {
        "columns": list(columns),
        "shape": list(schema.shape),
        "dtype": str(schema.dtype).removeprefix("torch."),
        "classes": 0 if schema.labels else schema.classes,
        "labels": [str(label) for label in schema.labels],
        "targets": schema.targets,
        "mean": list(schema.mean),
        "std": list(schema.std),
    }


def put_schema(config: Config, schema: Mapping[str, Any]) -> Config:
    """The config with these keys in section `data`."""
    return config.replace(**{f"data.{key}": value for key, value in schema.items()})


def agreed_record(federation: Federation) -> ConfigRecord:
    """What the server tells its nodes with every request: the schema, and the kernels that it chose."""
    columns = federation.config.section("data", DataSettings).columns
    agreed = schema_settings(federation.schema, columns)
    kernels, version = federation.config.kernels, federation.config.kernels_version
    return ConfigRecord({"schema": json.dumps(agreed), "kernels": kernels, "kernels_version": version})


def node_declaration(config: Config, app_config: AppConfig, context: Context) -> Declaration:
    """What a node says about its samples."""
    columns = config.section("data", DataSettings).table_columns()
    titles = {client_title(client, ()): source for client, source in node_sources(config, app_config, context).items()}
    whole = Path(str(context.node_config["data"])).expanduser()  # of which clients may have only some rows
    first = pinned_columns(whole if whole.is_file() else next(iter(titles.values())), columns)
    raw = {where: read(source, replace(columns, samples=first), where) for where, source in titles.items()}
    return declare(raw, config_targets(config), first)


def node_federation(config: Config, app_config: AppConfig, context: Context, content: RecordDict) -> Federation:
    """What a node works on: the schema that the server tells, and its own samples."""
    agreed = content.config_records[AGREED]
    kernels = str(agreed["kernels"])
    version = agreed.get("kernels_version", 1)
    config = put_schema(config, json.loads(str(agreed["schema"])))
    config = config.replace(kernels=kernels, kernels_version=version, partition="custom")
    sources = node_sources(config, app_config, context)
    clients = NodeClients.of(config, sources, {})
    federation = Federation.of(config, clients, Seeds(config.seed), resolve_device(config))
    if federation.config.kernels != kernels:
        raise UserError(
            f"the run is computed with kernels = '{kernels}', and here they are '{federation.config.kernels}': install "
            "a C++ compiler, unset DYNAFED_KERNELS, or set kernels = 'torch' for the run"
        )
    for client in sources:
        clients.read(client)  # so that what doesn't fit is refused before round 1
    return federation


def node_sources(config: Config, app_config: AppConfig, context: Context) -> dict[int, Any]:
    """The clients of a node, each with the source of its samples."""
    data = context.node_config.get("data")
    if not isinstance(data, str) or not data.strip():
        raise UserError('its --node-config needs data="...": a file, a folder, or module:function')
    partition, _ = node_partition(context)
    num_partitions = app_config.num_partitions or config.clients
    clients = range(partition, config.clients, num_partitions)
    sources = _sources(data, clients, config.section("data", DataSettings))
    if len(sources) != len(clients):
        raise UserError(
            f"data = '{data}' has {len(sources)} clients, but {len(clients)} of clients = {config.clients} belong to "
            f"its partition-id = {partition} of {num_partitions}"
        )
    return dict(zip(clients, sources, strict=True))


def _sources(data: str, clients: Sequence[int], settings: DataSettings) -> Sequence[Any]:
    """A function for each client, or a path for each."""
    path = Path(data).expanduser()
    if ":" in data and not path.exists():
        function = FUNCTIONS.load(data)
        if not callable(function):
            raise UserError(f"data = '{data}' is a {type(function).__name__}: name a function that returns samples")
        return [partial(function, client) for client in clients] if required_arguments(function) else [function]
    if (path.is_dir() and not is_client_path(path)) or (path.is_file() and settings.client):
        return list(file_clients(path, settings).values())
    return [path]

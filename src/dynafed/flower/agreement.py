"""The server's way to a schema when only its nodes have samples: collect what they declare, leave out the odd ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flwr.serverapp import Grid

from dynafed import models
from dynafed.config import Config
from dynafed.data.readers import Raw, read
from dynafed.data.schema import Schema
from dynafed.data.settings import DataSettings
from dynafed.data.targets import label_array
from dynafed.errors import UserError
from dynafed.flower.app_config import AppConfig
from dynafed.flower.declaration import Declaration, agree, agree_on_columns, read_declaration
from dynafed.flower.link import Link
from dynafed.flower.nodes import NodeDirectory
from dynafed.flower.own_data import NodeClients, put_schema, schema_settings
from dynafed.settings import plain
from dynafed.tasks import config_targets

log = logging.getLogger("dynafed")


def agreed_clients(
    config: Config, app_config: AppConfig, grid: Grid, before: Config | None
) -> tuple[Config, NodeClients, dict[int, str]]:
    """The config with the schema of the nodes' data, the clients as the server sees them, and the nodes refused so far.

    `before` is the config of a run that is continued: its schema counts, and nobody is asked.
    """
    _check(config)
    config = config.replace(partition="custom")
    held = _server_samples(config)
    mean_size, refused = 0, dict[int, str]()
    if before is not None:
        config = _continued(config, before)  # its kernels are chosen, so nobody needs the size
    else:
        config, mean_size, refused = _collect(config, app_config, grid, held)
    clients = NodeClients.of(config, {}, {}, mean_size)
    # Read again: by now it is known which columns count.
    clients.splits = {name: clients.schema.stored(*raw, name) for name, raw in _server_samples(config).items()}
    return config, clients, refused


def _check(config: Config) -> None:
    """Refuse what only a simulation can do."""
    settings = config.section("data", DataSettings)
    if config.evaluate == "test" and not settings.test:
        raise UserError("the server has no test samples: give it some as data.test, or set evaluate = 'clients'")
    leave = "leave it out"
    for key, wanted, way_out in (
        ("watch", config.watch, leave),
        ("dynafed.evidence", config.to_dict().get("dynafed", {}).get("evidence"), leave),
        ("validation_samples", config.validation_samples, leave),
        ("server_samples", config.server_samples if not settings.server else 0, "give the server some as data.server"),
    ):
        if wanted:
            raise UserError(f"{key} = {wanted} needs samples that are on the nodes: {way_out}")


def _server_samples(config: Config) -> dict[str, Raw]:
    """What the server has, as it was read."""
    settings = config.section("data", DataSettings)
    paths = {"test": settings.test, "server": settings.server}
    return {name: read(path, settings.table_columns(), f"data.{name}") for name, path in paths.items() if path}


def _continued(config: Config, before: Config) -> Config:
    """The config with what was agreed on before, where it says nothing itself."""
    empty, now, stored = (plain(each.section("data", DataSettings)) for each in (Config(), config, before))
    return config.replace(data={key: stored[key] if now[key] == empty[key] else now[key] for key in now})


def _collect(
    config: Config, app_config: AppConfig, grid: Grid, held: Mapping[str, Raw]
) -> tuple[Config, int, dict[int, str]]:
    """Wait for the nodes and let them declare their samples; the config with the schema, and a client's mean size."""
    settings = config.section("data", DataSettings)
    integers = models.takes_integers(config.model)
    classes = config_targets(config) in (None, "classes")
    labels = [label_array(y, f"data.{name}") for name, (_, y) in held.items()] if classes else []
    nodes: NodeDirectory[Declaration] = NodeDirectory(
        Link(lambda: grid), app_config, config.clients, read_declaration, message_type="query.declare"
    )
    found: list[tuple[Schema, tuple[str, ...]]] = []

    def settled() -> bool:
        while len(serving := nodes.serving()) >= nodes.wanted:
            declared = {node: nodes.accepted[node] for _, node in sorted(serving.items())}
            columns, odd = agree_on_columns(declared, settings)
            if not odd:
                schema, odd = agree(declared, settings, labels, integers)
            odd |= {
                node: f"it has {len(each.sizes)} clients, and its partition {nodes.partition_of[node]} has others"
                for node, each in declared.items()
                if len(each.sizes) != len(range(nodes.partition_of[node], config.clients, nodes.num_partitions))
            }
            if not odd:
                found.append((schema, columns))
                return True
            for node, reason in odd.items():
                nodes.reject(node, reason)
        return False

    nodes.wait(settled=settled)
    ((schema, columns),) = found
    log.info("samples are %s, %d classes", schema.shape, schema.classes)
    return put_schema(config, schema_settings(schema, columns)), _mean_size(nodes, schema, settings), nodes.rejected


def _mean_size(nodes: NodeDirectory[Declaration], schema: Schema, settings: DataSettings) -> int:
    """As in one process: of the clients that are read to find the classes; else of the first one."""
    serving = sorted(nodes.serving().items())
    sizes = [size for _, node in serving for size in nodes.accepted[node].sizes]
    all_read = schema.targets == "classes" and settings.given_classes() is None
    return sum(sizes) // len(sizes) if all_read else sizes[0]

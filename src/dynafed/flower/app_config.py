"""Reads a Flower app's config: the keys of a dynafed config, and those of the apps themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context

from dynafed.config import EXECUTION_KEYS, Config, parse_override
from dynafed.errors import UserError
from dynafed.settings import build, nearest, setting

PREFIX = "dynafed-"


@dataclass(frozen=True)
class AppConfig:
    """The keys that begin with `dynafed-`, such as `dynafed-min-nodes`."""

    config: str = setting("", "a preset or a TOML file, which the keys without the prefix change")
    out: str = setting("", "the run's folder, on the server; one that holds a run is continued")
    memory: str = setting("", "a folder on each node, in which what its clients remember survives a restart")
    num_partitions: int = setting(0, "parts that the clients are divided into (0: one for each client)", low=0)
    node_keys: str = setting("", "a file on the server that binds public keys of nodes to partitions")
    min_nodes: int = setting(0, "nodes that must be there to begin (0: one for each partition)", low=0)
    wait: float = setting(300.0, "seconds to wait for them", above=0)
    timeout: float = setting(3600.0, "seconds that a round's clients have to answer", above=0)

    @property
    def client_state_folder(self) -> Path | None:
        """The folder of the clients' states on a node, if there is one."""
        return Path(self.memory).expanduser() if self.memory else None


def read_app_config(run_config: Mapping[str, Any], node_config: Mapping[str, Any] | None = None) -> AppConfig:
    """The apps' own keys; a node's own config comes before the run's."""
    names = {PREFIX + field.name.replace("_", "-"): field.name for field in dataclasses.fields(AppConfig)}
    values = {}
    for key, value in {**run_config, **(node_config or {})}.items():
        if key.startswith(PREFIX):
            if key not in names:
                raise UserError(f"unknown key '{key}': {nearest(key, names)}")
            values[names[key]] = value
    return build(AppConfig, values, PREFIX)


def read_config(run_config: Mapping[str, Any], node_config: Mapping[str, Any] | None = None) -> Config:
    """The dynafed config; a node may set for itself how it is executed, such as `data_dir` and `device`.

    Flower's configs can't hold lists, so a string that is a TOML list stands for one: `"dynafed.targets" = "[2, 3]"`.
    """
    changes = {key: value for key, value in run_config.items() if not key.startswith(PREFIX)}
    changes |= {key: value for key, value in (node_config or {}).items() if key in EXECUTION_KEYS}
    changes = dict(
        parse_override(f"{key}={value}") if isinstance(value, str) else (key, value) for key, value in changes.items()
    )
    return Config.load(read_app_config(run_config).config or None, changes | {"engine": "flower"})


def node_partition(context: Context) -> tuple[int, int | None]:
    """A node's partition, and of how many, if it knows."""
    partition, num_partitions = (_node_number(context, key) for key in ("partition-id", "num-partitions"))
    if partition is None:
        raise UserError("its --node-config needs partition-id=N")
    if num_partitions is not None and not 0 <= partition < num_partitions:
        raise UserError(f"its partition-id = {partition} is not below its num-partitions = {num_partitions}")
    return partition, num_partitions


def _node_number(context: Context, key: str) -> int | None:
    value = context.node_config.get(key)
    if value is None or type(value) is int:
        return value
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    raise UserError(f"{key} = {value!r} in its --node-config is not a whole number")

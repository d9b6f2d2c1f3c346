"""The data of a run: what was given in Python, or what the config names, divided by the config's seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from dynafed.config import data_folder
from dynafed.data.arrays import Dataset, from_arrays
from dynafed.data.federated import FederatedData, SplitDataset
from dynafed.data.files import file_clients, find_path, pinned_columns
from dynafed.data.loading import load
from dynafed.data.own import OwnClients, own_clients
from dynafed.data.partition import Partition, carve, make_partition, partition_from_lists
from dynafed.data.settings import DataSettings
from dynafed.data.spec import NODES
from dynafed.data.targets import target_kind
from dynafed.errors import UserError
from dynafed.stages import stage

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.seeds import Seeds


@dataclass(frozen=True)
class Given:
    """What is given in Python in place of what a config names."""

    train: Any = None
    test: Any = None
    clients: Any = None
    server: Any = None


def federated_data(
    config: Config, seeds: Seeds, given: Given, *, integers: bool = True, targets: str | None = "classes"
) -> tuple[Config, FederatedData]:
    """The samples of a run, and its config with what they decide.

    `integers` says whether its network takes whole numbers, `targets` what is learned; without it, the targets tell.
    """
    if isinstance(given.clients, OwnClients):
        return config, given.clients
    if config.dataset == NODES and given.clients is None and given.train is None:
        raise UserError(f"dataset = '{NODES}': the samples are on Flower's nodes, so run it there (docs/flower.md)")
    named, clients = _named(given.clients)
    settings = config.section("data", DataSettings)
    own = clients is not None and any(is_client_data(client) for client in clients)
    if own or (settings.path and given.train is None):
        if given.train is not None:
            raise UserError("clients= have data of their own, so train= has no meaning: leave it out")
        return _own(config, named, clients, given, settings, integers, targets)
    if given.server is not None:
        raise UserError("server= goes with clients that have data of their own: set server_samples instead")
    config, dataset = _dataset(config, given.train, given.test, settings, targets)
    return _divided(config, dataset if integers else dataset.with_floats(), clients, seeds, named)


def _named(clients: Any) -> tuple[tuple[str, ...], Sequence[Any] | None]:
    """The clients' names, if they have some, and what each of them has."""
    if clients is not None and not isinstance(clients, int) and not len(clients):
        raise UserError("there are no clients: give at least one")
    if isinstance(clients, Mapping):
        return tuple(str(name) for name in clients), list(clients.values())
    if clients is None or (isinstance(clients, Sequence | np.ndarray) and not isinstance(clients, str)):
        return (), None if clients is None else list(clients)
    raise UserError(f"clients must be a list or a dict with an entry for each client, not a {type(clients).__name__}")


def is_client_data(client: Any) -> bool:
    """Whether it is data of a client's own; if not, it names rows of a dataset."""
    if isinstance(client, tuple | list) and len(client) == 2:
        return bool(np.ndim(client[0]) > 1 or isinstance(client[0], Tensor))
    return not isinstance(client, list | tuple | range | np.ndarray | Tensor)


def _own(
    config: Config,
    names: Sequence[str],
    clients: Sequence[Any] | None,
    given: Given,
    settings: DataSettings,
    integers: bool,
    targets: str | None,
) -> tuple[Config, OwnClients]:
    """Clients with data of their own."""
    if config.validation_samples:
        raise UserError("validation_samples can't be carved from clients with data of their own: evaluate = 'clients'")
    config, paths = _find_paths(config, settings)
    splits = {"test": given.test, "server": given.server}
    splits = {name: paths.get(name) if source is None else source for name, source in splits.items()}
    if splits["test"] is None and config.evaluate == "test":
        raise UserError("there are no test samples: pass test=(x, y) (data.test), or set evaluate = 'clients'")
    if splits["server"] is None and config.server_samples:
        raise UserError("server_samples can't be carved from clients with data of their own: pass server=(x, y)")
    title, table = "custom", None
    if clients is None:
        found = file_clients(paths["path"], settings, list(paths.values()))
        names, clients, title = tuple(found), list(found.values()), paths["path"].stem
        table = paths["path"] if paths["path"].is_file() else None
    if pinned := pinned_columns(table or clients[0], settings.table_columns()):
        config = config.replace(**{"data.columns": list(pinned)})
        settings = config.section("data", DataSettings)
    config = config.replace(dataset="custom", partition="custom", clients=len(clients))
    data = own_clients(
        clients,
        names,
        settings,
        {name: source for name, source in splits.items() if source is not None},
        name=title,
        memory=config.data_memory_mb * 2**20,
        integers=integers,
        targets=targets,
    )
    if "server" in data.splits:
        config = config.replace(server_samples=len(data.splits["server"][1]))
    return config, data


def _find_paths(config: Config, settings: DataSettings) -> tuple[Config, dict[str, Path]]:
    """The paths of the section `data`, and the config with the folder that they are in."""
    told = {"path": settings.path, "test": settings.test, "server": settings.server}
    paths = {name: find_path(path, config.data_dir, data_folder()) for name, path in told.items() if path}
    here = any((Path.cwd() / Path(path).expanduser()).exists() for path in told.values() if path)
    if paths and here and not config.data_dir:  # so that a resume from elsewhere finds them
        config = config.replace(data_dir=str(Path.cwd()))
    return config, paths


BY_CLASS = ("dirichlet", "dirichlet-balanced", "shards")
"""Partitions that look at the classes."""

_load = lru_cache(maxsize=1)(load)
"""Several runs on the same data read it once."""


def _dataset(
    config: Config, train: Any, test: Any, settings: DataSettings, targets: str | None
) -> tuple[Config, Dataset]:
    """The data that were given, or those that the config names."""
    if (train is None) != (test is None):
        raise UserError("give both train=(x, y) and test=(x, y), or neither")
    if train is not None and test is not None:
        kind = targets or target_kind(train[1])
        dataset = from_arrays(train, test, classes=settings.given_classes(), targets=kind)
        if settings.shape and settings.shape != dataset.shape:
            raise UserError(f"shape = {settings.shape} was given, but a training sample has {dataset.shape}")
        return config.replace(dataset="custom"), dataset
    if config.dataset == "custom":
        raise UserError("dataset = 'custom' stands for arrays given in Python: pass train= and test= again")
    if targets not in (None, "classes"):
        raise UserError(f"dataset = '{config.dataset}' has classes, and loss = '{config.loss}' is for {targets}")
    dataset = _load(config.dataset, config.data_folder())
    if config.data_dir:
        config = config.replace(data_dir=str(config.data_folder()))
    return config, dataset


def _divided(
    config: Config, dataset: Dataset, clients: Sequence[Any] | None, seeds: Seeds, names: Sequence[str] = ()
) -> tuple[Config, SplitDataset]:
    """Who holds which rows of the training split: the clients, the server, the validation set."""
    stage("dividing the data")
    labels = dataset.train_y.numpy() if dataset.targets == "classes" else np.zeros(len(dataset.train_y), np.int64)
    free = np.arange(len(labels))
    if clients is not None:
        given = partition_from_lists(clients, len(labels), allow_empty=config.min_samples == 0)
        config = config.replace(clients=len(given), partition="custom")
        free = np.setdiff1d(free, given.indices)
        if config.server_samples + config.validation_samples > len(free):
            raise UserError(
                f"clients=[...] leaves {len(free)} samples: too few for server_samples = {config.server_samples} "
                f"and validation_samples = {config.validation_samples}"
            )
    rest, server_rows = _carve(labels, free, config.server_samples, seeds, "server")
    rest, validation_rows = _carve(labels, rest, config.validation_samples, seeds, "validation")
    if clients is not None:
        return config, SplitDataset(dataset, given, server_rows, validation_rows, names)
    if config.partition == "custom":
        raise UserError("partition = 'custom' stands for index lists given in Python: pass clients= again")
    if dataset.targets != "classes" and config.partition in BY_CLASS:
        raise UserError(f"partition = '{config.partition}' divides classes: take iid, quantity or clients=[...]")
    shares = make_partition(
        config.partition,
        labels[rest],
        config.clients,
        alpha=config.alpha,
        classes_per_client=config.classes_per_client,
        min_samples=config.min_samples,
        rng=seeds.rng("partition"),
    )
    return config, SplitDataset(dataset, Partition(rest[shares.indices], shares.offsets), server_rows, validation_rows)


def _carve(
    labels: np.ndarray, rows: np.ndarray, size: int, seeds: Seeds, purpose: str
) -> tuple[np.ndarray, np.ndarray]:
    if not size:
        return rows, rows[:0]
    rest, held = carve(labels[rows], size, seeds.rng(purpose))
    return rows[rest], rows[held]

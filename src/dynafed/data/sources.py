"""The data of a run: what was given in Python, or what the config names, divided by the config's seed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dynafed.data.arrays import Dataset, from_arrays
from dynafed.data.federated import FederatedData, SplitDataset
from dynafed.data.loading import load
from dynafed.data.partition import Partition, carve, make_partition, partition_from_lists
from dynafed.errors import UserError

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.seeds import Seeds


def federated_data(
    config: Config,
    seeds: Seeds,
    *,
    train: tuple[Any, Any] | None = None,
    test: tuple[Any, Any] | None = None,
    clients: Sequence[Any] | None = None,
) -> tuple[Config, FederatedData]:
    """The samples of a run, and its config with what they decide."""
    config, dataset = _dataset(config, train, test)
    return _divided(config, dataset, clients, seeds)


_load = lru_cache(maxsize=1)(load)
"""Several runs on the same data read it once."""


def _dataset(config: Config, train: tuple[Any, Any] | None, test: tuple[Any, Any] | None) -> tuple[Config, Dataset]:
    """The data that were given, or those that the config names."""
    if (train is None) != (test is None):
        raise UserError("give both train=(x, y) and test=(x, y), or neither")
    if train is not None and test is not None:
        return config.replace(dataset="custom"), from_arrays(train, test)
    if config.dataset == "custom":
        raise UserError("dataset = 'custom' stands for arrays given in Python: pass train= and test= again")
    dataset = _load(config.dataset, config.data_folder())
    if config.data_dir:
        config = config.replace(data_dir=str(config.data_folder()))
    return config, dataset


def _divided(
    config: Config, dataset: Dataset, clients: Sequence[Any] | None, seeds: Seeds
) -> tuple[Config, SplitDataset]:
    """Who holds which rows of the training split: the clients, the server, the validation set."""
    labels = dataset.train_y.numpy()
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
        return config, SplitDataset(dataset, given, server_rows, validation_rows)
    if config.partition == "custom":
        raise UserError("partition = 'custom' stands for index lists given in Python: pass clients= again")
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

"""Datasets, and how their samples are divided among the clients. A name is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynafed.data.arrays import Dataset, from_arrays
    from dynafed.data.catalog import NAMES
    from dynafed.data.download import fetch
    from dynafed.data.federated import FederatedData, SplitDataset
    from dynafed.data.loading import check, describe, load
    from dynafed.data.own import OwnClients
    from dynafed.data.partition import PARTITIONS, Partition, carve, make_partition, partition_from_lists
    from dynafed.data.schema import Samples, Schema
    from dynafed.data.settings import DataSettings, data_changes
    from dynafed.data.sources import Given, federated_data
    from dynafed.data.spec import DATASETS, Checksums, DatasetSpec, Download, Format, check_name

_MODULES = {
    "arrays": ("Dataset", "from_arrays"),
    "catalog": ("NAMES",),
    "download": ("fetch",),
    "federated": ("FederatedData", "SplitDataset"),
    "loading": ("check", "describe", "load"),
    "partition": ("PARTITIONS", "Partition", "carve", "make_partition", "partition_from_lists"),
    "own": ("OwnClients",),
    "schema": ("Samples", "Schema"),
    "settings": ("DataSettings", "data_changes"),
    "sources": ("Given", "federated_data"),
    "spec": ("DATASETS", "Checksums", "DatasetSpec", "Download", "Format", "check_name"),
}

__all__ = [
    "DATASETS",
    "NAMES",
    "PARTITIONS",
    "Checksums",
    "DataSettings",
    "Dataset",
    "DatasetSpec",
    "Download",
    "FederatedData",
    "Format",
    "Given",
    "OwnClients",
    "Partition",
    "Samples",
    "Schema",
    "SplitDataset",
    "carve",
    "check",
    "check_name",
    "data_changes",
    "describe",
    "federated_data",
    "fetch",
    "from_arrays",
    "load",
    "make_partition",
    "partition_from_lists",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

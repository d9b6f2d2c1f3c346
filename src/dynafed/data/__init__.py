"""Datasets, from wherever they are, and who gets which of their samples."""

from dynafed.data.dataset import Dataset, from_arrays
from dynafed.data.download import fetch
from dynafed.data.partition import PARTITIONS, Partition, carve, make_partition, partition_from_lists
from dynafed.data.sources import NAMES, check_name, describe, load
from dynafed.data.verify import check

__all__ = [
    "NAMES",
    "PARTITIONS",
    "Dataset",
    "Partition",
    "carve",
    "check",
    "check_name",
    "describe",
    "fetch",
    "from_arrays",
    "load",
    "make_partition",
    "partition_from_lists",
]

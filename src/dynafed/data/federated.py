"""Where the samples of a federation are: what a run reads them through, and one dataset that is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dynafed.data.arrays import Dataset
from dynafed.data.partition import Partition
from dynafed.data.schema import Samples, Schema

CPU = torch.device("cpu")


class FederatedData(Protocol):
    """The samples of a federation: its clients', the server's own, and those that models are evaluated on.

    Clients are numbered from 0. Whatever returns a client's samples returns them as a network takes them, on `device`.
    """

    @property
    def schema(self) -> Schema:
        """What all samples look like."""

    @property
    def names(self) -> Sequence[str]:
        """A name for each client; empty if they only have numbers."""

    def num_clients(self) -> int:
        """How many clients there are."""

    def client_size(self, client: int) -> int | None:
        """How many samples a client has; None if that isn't known before they are read."""

    def mean_client_size(self) -> int:
        """About how many samples a client has."""

    def client(self, client: int, device: torch.device = CPU) -> Samples:
        """One client's samples, read when they are asked for; raises `UserError` if they can't be."""

    def class_counts(self, client: int) -> Sequence[int] | None:
        """How many samples of each class a client has; None if that isn't known before they are read.

        If there are no classes, one number: how many samples it has.
        """

    def split(self, name: str) -> Samples | None:
        """The samples of "test", "validation" or "server" as they are stored; None if there are none."""

    def draw(self, count: int, rng: np.random.Generator, device: torch.device = CPU) -> Samples:
        """Some training samples of no client in particular, for measurements that only a simulation can make."""

    def fingerprint(self) -> Sequence[np.ndarray]:
        """What tells these samples and this split from others."""

    def prepare(self) -> None:
        """Compute what worker processes share, before they are forked."""


@dataclass(frozen=True, eq=False)
class SplitDataset:
    """One dataset, whose training samples are divided among the clients, the server and a validation set."""

    dataset: Dataset
    partition: Partition
    server_rows: np.ndarray
    validation_rows: np.ndarray
    names: Sequence[str] = ()

    @property
    def schema(self) -> Schema:
        """That of the dataset."""
        return self.dataset.schema

    def num_clients(self) -> int:
        """How many clients the partition has."""
        return len(self.partition)

    def client_size(self, client: int) -> int:
        """How many samples a client has."""
        return len(self.partition[client])

    def mean_client_size(self) -> int:
        """The mean, rounded down."""
        return len(self.partition.indices) // len(self.partition)

    def client(self, client: int, device: torch.device = CPU) -> Samples:
        """One client's samples."""
        return self._training_rows(self.partition[client], device)

    def class_counts(self, client: int) -> Sequence[int]:
        """How many samples of each class a client has."""
        if self.dataset.targets != "classes":
            return [self.client_size(client)]
        labels = self.dataset.train_y.numpy()[self.partition[client]]
        counts: list[int] = np.bincount(labels, minlength=self.dataset.classes).tolist()
        return counts

    def split(self, name: str) -> Samples | None:
        """The dataset's own test split, or what was carved from the training split."""
        if name == "test":
            return self.dataset.test_x, self.dataset.test_y
        rows = torch.from_numpy({"validation": self.validation_rows, "server": self.server_rows}[name])
        return (self.dataset.train_x[rows], self.dataset.train_y[rows]) if len(rows) else None

    def draw(self, count: int, rng: np.random.Generator, device: torch.device = CPU) -> Samples:
        """Rows of the training split; drawn with replacement only if there are too few."""
        total = len(self.dataset.train_y)
        return self._training_rows(np.sort(rng.choice(total, count, replace=count > total)), device)

    def fingerprint(self) -> Sequence[np.ndarray]:
        """All labels, some samples and the partition."""
        dataset, partition = self.dataset, self.partition
        some = [x[:: max(1, len(x) // 64)].contiguous().numpy() for x in (dataset.train_x, dataset.test_x)]
        return dataset.train_y.numpy(), dataset.test_y.numpy(), *some, partition.indices, partition.offsets

    def prepare(self) -> None:
        """Normalize the training samples once, if they are few enough."""
        _ = self.dataset.ready

    def _training_rows(self, rows: np.ndarray, device: torch.device) -> Samples:
        index = torch.from_numpy(rows)
        # What is normalized already is float32, and stays as it is.
        return self.schema.to_input((self.dataset.ready.index_select(0, index), self.dataset.train_y[index]), device)

"""Clients with data of their own: each is read when it is asked for, and only so many stay in memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynafed.data.federated import CPU
from dynafed.data.readers import Columns, Raw, is_lazy, read
from dynafed.data.schema import Samples, Schema, sample_tensor
from dynafed.data.settings import DataSettings
from dynafed.data.targets import label_array, number_targets, settle_classes, target_kind
from dynafed.errors import UserError

MEAN_STD = 0.5
"""Mean and standard deviation by which uint8 samples are normalized if none are given: nobody's data decide them."""


class SampleCache:
    """The clients' samples that were used last, at most so many bytes of them."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self.entries: OrderedDict[int, Samples] = OrderedDict()

    def get(self, client: int) -> Samples | None:
        """A client's samples, if they are here."""
        if client in self.entries:
            self.entries.move_to_end(client)
        return self.entries.get(client)

    def put(self, client: int, samples: Samples) -> None:
        """Keep a client's samples; those that were used longest ago make room."""
        self.entries[client] = samples
        self.used += _nbytes(samples)
        while self.used > self.limit:
            self.used -= _nbytes(self.entries.popitem(last=False)[1])


def _nbytes(samples: Samples) -> int:
    return sum(tensor.nbytes for tensor in samples)


@dataclass(eq=False)
class OwnClients:
    """A source of samples for each client; a `FederatedData`."""

    sources: Sequence[Any]
    names: Sequence[str]
    schema: Schema
    columns: Columns
    splits: Mapping[str, Samples]
    """What the server has, by split."""
    memory: int
    """Bytes of samples that stay in memory, in each process."""
    counts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """How many samples of each class clients have, as far as that is known."""

    def __post_init__(self) -> None:
        self.cache = SampleCache(self.memory)

    def num_clients(self) -> int:
        """How many sources there are."""
        return len(self.sources)

    def client_size(self, client: int) -> int | None:
        """How many samples a client has, if it was read before round 1."""
        return sum(self.counts[client]) if client in self.counts else None

    def mean_client_size(self) -> int:
        """The mean over the clients that were read, rounded down."""
        return sum(map(sum, self.counts.values())) // max(1, len(self.counts))

    def client(self, client: int, device: torch.device = CPU) -> Samples:
        """One client's samples."""
        return self.schema.to_input(self.read(client), device)

    def read(self, client: int) -> Samples:
        """One client's samples as they are stored."""
        samples = self.cache.get(client)
        if samples is None:
            where = client_title(client, self.names)
            samples = self.schema.stored(*read(self.sources[client], self.columns, where), where)
            self.cache.put(client, samples)
        return samples

    def class_counts(self, client: int) -> Sequence[int] | None:
        """How many samples of each class a client has, if it was read before round 1."""
        return self.counts.get(client)

    def split(self, name: str) -> Samples | None:
        """What the server has."""
        return self.splits.get(name)

    def draw(self, count: int, rng: np.random.Generator, device: torch.device = CPU) -> Samples:
        """Samples of clients that are drawn, each with one of its own."""
        parts = [self.read(int(client)) for client in rng.integers(0, len(self.sources), count)]
        rows = [int(rng.integers(0, len(y))) for _, y in parts]
        x = torch.stack([part[0][row] for part, row in zip(parts, rows, strict=True)])
        y = torch.stack([part[1][row] for part, row in zip(parts, rows, strict=True)])
        return self.schema.to_input((x, y), device)

    def fingerprint(self) -> Sequence[np.ndarray]:
        """Names and layout; labels and some samples of what is in memory; names and sizes of files."""
        said = [str(self.schema), *self.names]
        for client, source in enumerate(self.sources):
            if is_lazy(source):
                path = Path(source) if isinstance(source, str | Path) else None
                said.append(f"{path.name} {path.stat().st_size if path.is_file() else ''}" if path else "")
            else:
                said.append(_digest(self.read(client)))
        said += [_digest(samples) for samples in self.splits.values()]
        return [np.frombuffer("\0".join(said).encode(), np.uint8)]

    def prepare(self) -> None:
        """Nothing: each process reads the clients that it trains."""


def client_title(client: int, names: Sequence[str]) -> str:
    """A client as an error names it."""
    return f"client '{names[client]}'" if names else f"client {client}"


def own_clients(
    sources: Sequence[Any],
    names: Sequence[str],
    given: DataSettings,
    splits: Mapping[str, Any],
    *,
    memory: int,
    integers: bool = True,
    targets: str | None = "classes",
    name: str = "custom",
) -> OwnClients:
    """The clients of these sources, and the server's `splits`. Without `targets`, those of the first client decide.

    Shape, type and classes are those given. Without them, shape and type are those of the first client's samples, and
    all clients are read once for the classes. Those in memory are all looked at in any case.
    """
    columns = given.table_columns()
    first = read(sources[0], columns, client_title(0, names))
    sample = sample_tensor(first[0], client_title(0, names))
    layout = make_layout(sample.dtype, tuple(sample.shape[1:]), given, name, integers)
    kind = targets or target_kind(first[1])
    if kind != "classes":
        number = number_targets(first[1], None, kind, client_title(0, names)).shape[1]
        layout = replace(layout, targets=kind, classes=number, flat=np.ndim(first[1]) == 1)
    needs_all = kind == "classes" and given.given_classes() is None
    scanned = len(sources) if needs_all or not any(map(is_lazy, sources)) else 1
    found = [_look(layout, client_title(0, names), first)]
    for client in range(1, scanned):
        where = client_title(client, names)
        found.append(_look(layout, where, read(sources[client], columns, where)))
    raw_splits = {split: read(source, columns, split) for split, source in splits.items()}
    held = [_look(layout, split, raw) for split, raw in raw_splits.items()]
    schema = add_classes(layout, given, [each.values for each in (*found, *held)])
    stored = {split: schema.stored(*raw, split) for split, raw in raw_splits.items()}
    counts = {client: each.by_class(schema, client_title(client, names)) for client, each in enumerate(found)}
    return OwnClients(sources, names, schema, columns, stored, memory, counts)


def make_layout(
    dtype: torch.dtype, shape: tuple[int, ...], given: DataSettings, name: str, integers: bool = True
) -> Schema:
    """Type, shape and scale of the samples: as given, else those that were found. No classes yet.

    With `integers` False, the network takes no whole numbers.
    """
    dtype = getattr(torch, given.dtype) if given.dtype else dtype
    if dtype == torch.int64 and not integers:
        dtype = torch.float32
    shape = given.shape or shape
    channels = shape[0] if len(shape) in (1, 3) else 1
    mean, std = given.mean, given.std
    if dtype == torch.uint8 and not (mean or std):
        mean = std = (MEAN_STD,) * (channels if len(shape) == 3 else 1)
    if len(mean) != len(std) or len(mean) not in (0, 1, channels):
        raise UserError(
            f"data.mean has {len(mean)} values and data.std {len(std)}: samples of shape {shape} need {channels} each"
        )
    return Schema(name, shape, dtype, 0, mean, std)


def add_classes(layout: Schema, given: DataSettings, found: Sequence[np.ndarray]) -> Schema:
    """The layout with its classes: as given, else those among the labels that were found; as it is without classes."""
    if layout.targets != "classes":
        return layout
    number, labels = settle_classes(given.given_classes(), found, "the clients' data")
    return replace(layout, classes=number, labels=labels, class_names=tuple(map(str, labels)))


@dataclass(frozen=True)
class LabelCounts:
    """Which labels a client has, and how often; without classes, no labels and one count."""

    values: np.ndarray
    counts: np.ndarray

    def by_class(self, schema: Schema, where: str) -> list[int]:
        """How many samples of each class there are."""
        if schema.targets != "classes":
            return self.counts.tolist()  # type: ignore[no-any-return]
        numbers = schema.stored_y(self.values, len(self.values), where)
        return torch.bincount(numbers, torch.from_numpy(self.counts), schema.classes).long().tolist()


def _look(layout: Schema, where: str, raw: Raw) -> LabelCounts:
    """Check one client's samples; returns which labels they have."""
    x = layout.stored_x(raw[0], where)
    if layout.targets != "classes":
        return LabelCounts(np.empty(0), np.array([len(layout.stored_y(raw[1], len(x), where))]))
    labels = label_array(raw[1], where)
    if len(labels) != len(x):
        raise UserError(f"{where} has {len(labels)} labels for {len(x)} samples: give one label for each")
    return LabelCounts(*np.unique(labels, return_counts=True))


def _digest(samples: Samples) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    x, y = samples
    for tensor in (x[:: max(1, len(x) // 64)], y):
        hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        hasher.update(np.ascontiguousarray(tensor.numpy()).data)
    return hasher.hexdigest()

"""How samples are divided among clients: a matrix of counts (classes, clients), filled from shuffled classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynafed.errors import UserError
from dynafed.registry import Registry

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Partition:
    """The sample indices of every client, end to end: client c holds `indices[offsets[c]:offsets[c + 1]]`."""

    indices: Ints
    offsets: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Ints:
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> Ints:
        """How many samples each client has."""
        return np.diff(self.offsets)

    def class_counts(self, labels: ArrayLike, classes: int) -> Ints:
        """How many samples of each class each client has, as (clients, classes)."""
        cells = np.repeat(np.arange(len(self)), self.sizes) * classes + np.asarray(labels)[self.indices]
        return np.bincount(cells, minlength=len(self) * classes).reshape(len(self), classes)


def partition_from_lists(lists: Sequence[Any], samples: int, *, allow_empty: bool = False) -> Partition:
    """The partition of one array of sample indices, or one boolean mask, per client; clients may share samples."""
    try:
        parts = [_rows(np.asarray(part), client, samples) for client, part in enumerate(lists)]
    except TypeError:
        raise UserError(f"clients must be a list of index arrays, one per client, not {type(lists).__name__}") from None
    if not parts:
        raise UserError("the partition has no clients: give one array of sample indices per client")
    for client, part in enumerate(parts):
        if part.ndim != 1 or (part.size and part.dtype.kind not in "iu"):
            raise UserError(f"client {client}'s samples must be a flat list of whole numbers, not {_brief(part)}")
        if not (part.size or allow_empty):
            raise UserError(f"client {client} has no samples: leave it out, or set min_samples = 0")
    sizes = np.array([part.size for part in parts])
    indices = np.concatenate([part.astype(np.int64, copy=False) for part in parts])
    wrong = np.flatnonzero((indices < 0) | (indices >= samples))
    if wrong.size:
        client = int(np.searchsorted(np.cumsum(sizes), wrong[0], side="right"))
        raise UserError(f"client {client} asks for sample {indices[wrong[0]]}, but they go from 0 to {samples - 1}")
    return Partition(indices, _offsets(sizes))


def _rows(part: NDArray[Any], client: int, samples: int) -> NDArray[Any]:
    """The indices that a mask stands for; indices as they are."""
    if part.dtype != np.bool_ or part.ndim != 1:
        return part
    if len(part) != samples:
        raise UserError(f"client {client}'s mask has {len(part)} values for {samples} samples: give one for each")
    return np.flatnonzero(part)


class PartitionFunction(Protocol):
    """A kind of partition. Returns a `Partition`, or one array of sample indices per client.

    `labels` is an int64 array with one label per sample, the other arguments are the config's keys. All randomness is
    drawn from `rng`.
    """

    def __call__(
        self,
        labels: Ints,
        clients: int,
        *,
        alpha: float,
        classes_per_client: int,
        min_samples: int,
        rng: np.random.Generator,
    ) -> Partition | Sequence[ArrayLike]:
        """The samples of every client."""


def make_partition(
    kind: str,
    labels: ArrayLike,
    clients: int,
    *,
    alpha: float = 0.1,
    classes_per_client: int = 2,
    min_samples: int = 1,
    rng: np.random.Generator,
) -> Partition:
    """The partition of a registered kind; no client gets fewer than `min_samples`.

    The built-in kinds give every sample to exactly one client.
    """
    labels = _labels(labels)
    if clients < 1:
        raise UserError(f"clients = {clients} must be at least 1")
    if min_samples < 0:
        raise UserError(f"min_samples = {min_samples} must be at least 0")
    if not 0 < alpha < math.inf:
        raise UserError(f"alpha = {alpha} must be a finite number more than 0")
    if len(labels) < clients * min_samples:
        raise UserError(
            f"{len(labels)} samples are too few for clients = {clients} with min_samples = {min_samples} each: "
            f"lower one of the two"
        )
    function = PARTITIONS.load(kind)
    if not callable(function):
        raise UserError(f"partition = '{kind}' is {type(function).__name__}: it must be a function")
    made: Any = function(
        labels, clients, alpha=alpha, classes_per_client=classes_per_client, min_samples=min_samples, rng=rng
    )
    partition = partition_from_lists(made, len(labels), allow_empty=True)
    if len(partition) != clients:
        raise UserError(f"partition = '{kind}' returned {len(partition)} clients instead of {clients}")
    if (least := partition.sizes.min()) < min_samples:
        raise UserError(f"partition = '{kind}' leaves a client {least} samples, fewer than min_samples = {min_samples}")
    return partition


def iid(labels: Ints, clients: int, *, rng: np.random.Generator, **_: Any) -> Partition:
    """Equal sizes, drawn uniformly."""
    return _assign(np.zeros_like(labels), _even(labels, clients)[None, :], rng)


def dirichlet(
    labels: Ints, clients: int, *, alpha: float, min_samples: int, rng: np.random.Generator, **_: Any
) -> Partition:
    """Each class is divided by its own draw from Dirichlet(alpha)."""
    totals = _totals(labels)
    counts = _apportion(np.exp(_log_dirichlet(alpha, (len(totals), clients), rng)), totals)
    return _assign(labels, _resize(counts, _at_least(counts.sum(axis=0), min_samples)), rng)


def dirichlet_balanced(labels: Ints, clients: int, *, alpha: float, rng: np.random.Generator, **_: Any) -> Partition:
    """Each class is divided by a draw from Dirichlet(alpha), scaled so that all clients have equal sizes."""
    totals = _totals(labels)
    logs = _log_dirichlet(alpha, (len(totals), clients), rng)
    return _assign(labels, _resize(_apportion(_sinkhorn(logs, totals), totals), _even(labels, clients)), rng)


def shards(labels: Ints, clients: int, *, classes_per_client: int, rng: np.random.Generator, **_: Any) -> Partition:
    """Each client gets `classes_per_client` classes, picked at random among those picked least."""
    return _assign(labels, _shards(_totals(labels), clients, classes_per_client, rng), rng)


def quantity(labels: Ints, clients: int, **settings: Any) -> Partition:
    """Sizes are drawn from Dirichlet(alpha), samples uniformly."""
    return dirichlet(np.zeros_like(labels), clients, **settings)


PARTITIONS: Registry[PartitionFunction] = Registry(
    "partition",
    {
        "iid": iid,
        "dirichlet": dirichlet,
        "dirichlet-balanced": dirichlet_balanced,
        "shards": shards,
        "quantity": quantity,
    },
)
"""All kinds of partitions by name."""


def carve(labels: ArrayLike, size: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Hold back `size` samples, stratified by class. Returns the sorted indices of the rest and of those held back."""
    labels = _labels(labels)
    if not 0 <= size < len(labels):
        raise UserError(f"can't hold back {size} of {len(labels)} samples: ask for fewer")
    _, labels, totals = np.unique(labels, return_inverse=True, return_counts=True)
    quota = _apportion(totals[None, :].astype(float), np.array([size]))[0]
    order = _shuffled_by_class(labels, rng)
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(totals) - totals, totals)
    held = rank < np.repeat(quota, totals)
    return np.sort(order[~held]), np.sort(order[held])


def _labels(labels: ArrayLike) -> Ints:
    array = np.asarray(labels)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise UserError(f"labels must be a flat array of whole numbers, not {_brief(array)}")
    return array.astype(np.int64, copy=False)


def _brief(array: NDArray[Any]) -> str:
    return f"{array.dtype} of shape {array.shape}"


def _offsets(sizes: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _totals(labels: Ints) -> Ints:
    """The number of samples of each class that occurs."""
    return np.unique(labels, return_counts=True)[1]


def _even(labels: Ints, clients: int) -> Ints:
    """Sizes that differ by one at most."""
    return np.diff(np.arange(clients + 1) * len(labels) // clients)


def _assign(labels: Ints, counts: Ints, rng: np.random.Generator) -> Partition:
    """The partition in which client c has `counts[k, c]` random samples of the k-th class that occurs."""
    classes, clients = counts.shape
    owner = np.empty(len(labels), np.int64)
    owner[_shuffled_by_class(labels, rng)] = np.repeat(np.tile(np.arange(clients), classes), counts.ravel())
    return Partition(np.argsort(owner, kind="stable"), _offsets(np.bincount(owner, minlength=clients)))


def _shuffled_by_class(labels: Ints, rng: np.random.Generator) -> Ints:
    order = rng.permutation(len(labels))
    return order[np.argsort(labels[order], kind="stable")]


def _log_dirichlet(alpha: float, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """The log of Dirichlet(alpha) rows.

    A small alpha's gamma draws underflow to 0 (and 0/0 is NaN), their logs don't: G(a) = G(a + 1) * U^(1/a).
    """
    uniform = 1 - rng.random(shape)
    logs = np.log(rng.standard_gamma(alpha + 1, shape)) + np.log(uniform) / max(alpha, 1e-300)
    return logs - _logsumexp(logs, axis=1)


def _logsumexp(logs: Floats, axis: int) -> Floats:
    top = logs.max(axis=axis, keepdims=True)
    return np.asarray(top + np.log(np.exp(logs - top).sum(axis=axis, keepdims=True)))


def _sinkhorn(logs: Floats, totals: Ints) -> Floats:
    """Scale rows and columns until every client has the same share and every class its total; returns the shares."""
    rows = np.log(totals / totals.sum())[:, None]
    column = -math.log(logs.shape[1])
    # A tiny alpha would need too many iterations; `_resize` makes the sizes exact.
    for _ in range(min(1000, 10 + 200_000_000 // logs.size)):
        logs = logs + column - _logsumexp(logs, axis=0)
        gap = rows - _logsumexp(logs, axis=1)
        logs = logs + gap
        if np.abs(gap).max() < 1e-4:
            break
    return np.exp(logs)


def _apportion(weights: Floats, totals: Ints) -> Ints:
    """Whole numbers in proportion to each row's weights, with the row's total as their sum."""
    sums = np.cumsum(weights, axis=1)
    edges = np.rint(sums / sums[:, -1:] * totals[:, None]).astype(np.int64)
    return np.diff(edges, axis=1, prepend=0)


def _at_least(sizes: Ints, least: int) -> Ints:
    """Sizes with the same sum and none under `least`: what is added to small ones is taken from the largest."""
    raised = np.maximum(sizes, least)
    excess = int(raised.sum() - sizes.sum())
    low, high = least, int(raised.max())
    while low < high:
        level = (low + high) // 2
        if np.maximum(raised - level, 0).sum() <= excess:
            high = level
        else:
            low = level + 1
    excess -= int(np.maximum(raised - high, 0).sum())
    raised = np.minimum(raised, high)
    raised[np.flatnonzero(raised == high)[:excess]] -= 1
    return raised


def _resize(counts: Ints, sizes: Ints) -> Ints:
    """Move samples between clients until each has its size, with few classes per client.

    A client with too many gives up the classes that it has least of, one with too few takes more of the class that it
    has most of.
    """
    order = np.argsort(counts, axis=0, kind="stable")
    ascending = np.take_along_axis(counts, order, axis=0)
    surplus = counts.sum(axis=0) - sizes
    given = np.clip(surplus - (np.cumsum(ascending, axis=0) - ascending), 0, ascending)
    counts = counts.copy()
    np.put_along_axis(counts, order, ascending - given, axis=0)
    pool = np.bincount(order.ravel(), weights=given.ravel(), minlength=len(counts)).astype(np.int64)
    scale = pool.sum() + 1
    for client in np.flatnonzero(surplus < 0):
        need = -surplus[client]
        while need:
            best = np.argmax(np.where(pool > 0, counts[:, client] * scale + pool, -1))
            taken = min(need, pool[best])
            counts[best, client] += taken
            pool[best] -= taken
            need -= taken
    return counts


def _shards(totals: Ints, clients: int, each: int, rng: np.random.Generator) -> Ints:
    """The counts of `shards`."""
    classes = len(totals)
    if not 1 <= each <= classes:
        raise UserError(f"classes_per_client = {each} must be from 1 to the {classes} classes there are")
    if clients * each < classes:
        raise UserError(
            f"clients = {clients} with classes_per_client = {each} leave some of the {classes} classes to nobody: "
            f"raise one of the two"
        )
    used = np.zeros(classes, np.int64)
    rank = np.full((classes, clients), -1)
    for client in range(clients):
        picked = np.argsort(used + rng.random(classes))[:each]
        rank[picked, client] = used[picked]
        used[picked] += 1
    if (short := np.flatnonzero(totals < used)).size:
        raise UserError(
            f"a class of {totals[short[0]]} samples can't be shared by {used[short[0]]} clients: "
            f"use fewer clients or a smaller classes_per_client than {each}"
        )
    share, left = np.divmod(totals, used)
    return np.where(rank >= 0, share[:, None] + (rank < left[:, None]), 0)

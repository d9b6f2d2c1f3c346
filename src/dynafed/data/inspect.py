"""What was found in clients' own data, and what is odd about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynafed.data.own import OwnClients
from dynafed.data.sources import Given, federated_data
from dynafed.errors import UserError
from dynafed.tasks import TARGETS

if TYPE_CHECKING:
    from dynafed.config import Config

LARGE = 10
"""A client with so many times the median's samples is odd."""

MOST = 5
"""Clients or features that a sentence names."""


def check_config(config: Config) -> dict[str, Any]:
    """Read all clients of a config's section `data`; plain values: what there is, and a list of what is odd."""
    from dynafed.seeds import Seeds

    evaluated = config.replace(evaluate="clients", server_samples=0, validation_samples=0)
    targets = TARGETS.get(config.loss)
    _, found = federated_data(evaluated, Seeds(config.seed), Given(), targets=targets)
    if not isinstance(found, OwnClients):
        raise UserError("the config has no data.path: `dynafed data check NAME` looks at a dataset")
    return check_clients(found)


def check_clients(data: OwnClients) -> dict[str, Any]:
    """The same of clients that are given."""
    names = list(data.names) or [str(client) for client in range(data.num_clients())]
    schema, classified = data.schema, data.schema.targets == "classes"
    counts, moments = [], np.zeros((3, *schema.shape))
    for client in range(data.num_clients()):
        x, y = data.read(client)
        counts.append(torch.bincount(y, minlength=schema.classes).tolist() if classified else [len(y)])
        wide = x.double().numpy()
        moments += np.stack([np.full(schema.shape, len(wide)), wide.sum(0), (wide**2).sum(0)])
    sizes = [sum(each) for each in counts]
    mean, std = _scale(moments, schema.shape, 255 if schema.dtype == torch.uint8 else 1)
    report = {
        "name": schema.name,
        "clients": len(names),
        "samples": sum(sizes),
        "smallest": min(sizes),
        "median": float(np.median(sizes)),
        "largest": max(sizes),
        "shape": list(schema.shape),
        "dtype": str(schema.dtype).removeprefix("torch."),
        "learned": f"{schema.classes} {schema.targets}",
        "columns": list(data.columns.samples),
        "test": len(data.splits["test"][1]) if "test" in data.splits else 0,
        "measured_mean": mean,
        "measured_std": std,
    }
    if classified:
        report["labels"] = list(schema.labels) or list(range(schema.classes))
        report["class_counts"] = np.sum(counts, 0).tolist()
    return report | {"odd": list(_odd(names, sizes, counts if classified else [], report, schema.mean))}


def check_path(path: Path, config: Config) -> dict[str, Any]:
    """The same of a file or folder."""
    return check_config(config.replace(**{"data.path": str(path.absolute())}))


def _scale(moments: np.ndarray, shape: tuple[int, ...], unit: int) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel of images, else per feature; of long samples, of all together."""
    axes = (1, 2) if len(shape) == 3 else () if len(shape) == 1 and shape[0] <= 100 else tuple(range(len(shape)))
    total, added, squared = (part.sum(axis=axes) if axes else part for part in moments)
    mean = added / total
    spread = np.sqrt(np.maximum(squared / total - mean**2, 0))
    return tuple(np.round(np.atleast_1d(each) / unit, 4).tolist() for each in (mean, spread))


def _odd(
    names: list[str], sizes: list[int], counts: list[list[int]], report: dict[str, Any], mean: tuple[float, ...]
) -> Iterator[str]:
    """What somebody should know before training."""
    tests = {
        "has one sample": [size == 1 for size in sizes],
        f"has more than {LARGE} times the median's samples": [size > LARGE * report["median"] for size in sizes],
        "has only one class": [sum(map(bool, each)) == 1 for each in counts],
    }
    for words, found in tests.items():
        chosen = [name for name, odd in zip(names, found, strict=False) if odd]
        if chosen:
            yield (
                f"{_listed(chosen)} {words}"
                if len(chosen) == 1
                else f"{len(chosen)} clients: each {words} ({_listed(chosen)})"
            )
    for label, column in zip(report.get("labels", []), zip(*counts, strict=True), strict=False):
        holders = [name for name, count in zip(names, column, strict=True) if count]
        if len(holders) < 2 < len(names):
            yield f"class {label} is held by {holders[0] if holders else 'nobody'} alone"
    spread = report["measured_std"]
    if not all(spread):
        yield f"feature {_listed([str(n) for n, s in enumerate(spread) if not s])} never changes"
    if report["dtype"] == "float32" and not mean and max([*spread, *map(abs, report["measured_mean"])]) > LARGE:
        yield "features are on a large scale: copy measured_mean and measured_std to data.mean and data.std"
    if not report["test"]:
        yield "the server has no test samples (data.test): set evaluate = 'clients'"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:MOST]) + (", ..." if len(names) > MOST else "")

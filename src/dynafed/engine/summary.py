"""A run's numbers: reading metrics.jsonl and summary.json, and making the summary."""

from __future__ import annotations

import itertools
import json
import platform
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynafed.callbacks import Record
from dynafed.engine.files import checksum, to_line, write_bytes
from dynafed.version import __version__

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.engine.federation import Federation

FINAL_ROUNDS = 5
"""The paper reports the mean accuracy of so many last rounds."""

CLIENT_KEYS = ("accuracy_per_client", "rmse_per_client", "loss_per_client", "accuracy_per_class", "confusion")
"""What the summary takes from the last evaluation: how well each client and each class is served."""


def summarize(federation: Federation, history: list[Record], seconds: float, stopped: str = "") -> dict[str, Any]:
    """The run in a few numbers: summary.json."""
    import torch

    config, problem = federation.config, federation.problem
    task = problem.task
    metric, choose = task.metric, max if task.larger_is_better else min
    evaluated = [record for record in history if metric in record]
    last = [record[metric] for record in evaluated[-FINAL_ROUNDS:]]
    best = choose(evaluated, key=lambda record: float(record[metric]))
    reached = (record["round"] for record in evaluated if record.get("accuracy", 0) >= config.target_accuracy)
    served = {key: value for key, value in evaluated[-1].items() if key in CLIENT_KEYS or key.endswith("_worst_tenth")}
    return {
        "method": config.method,
        "dataset": federation.schema.name,
        "seed": config.seed,
        "evaluated_on": config.evaluate,
        "metric": metric,
        f"final_{metric}": statistics.fmean(last),
        "final_std": statistics.pstdev(last),
        "best": best[metric],
        "best_round": best["round"],
        "target_accuracy": config.target_accuracy or None,
        "rounds_to_target": next(reached, None) if config.target_accuracy else None,
        "rounds": len(history),
        **({"stopped": stopped} if stopped else {}),
        **({"attack": federation.attack.summary()} if federation.attack else {}),
        **_privacy(config, history),
        "parameters": sum(problem.model.get_parameter(name).numel() for name in problem.trainable),
        "bytes_up": sum(record.get("bytes_up", 0) + record.get("bytes_enrolment", 0) for record in history),
        "bytes_down": sum(record["bytes_down"] for record in history),
        **served,
        "seconds": seconds,
        "peak_rss_mb": _peak_rss_mb(),
        "versions": {
            "dynafed": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def _privacy(config: Config, history: list[Record]) -> dict[str, Any]:
    """The privacy loss of the rounds so far, if the run has differential privacy."""
    from dynafed.privacy import dp_settings

    chosen = dp_settings(config)
    if chosen is None:
        return {}
    return {"epsilon": next((r["epsilon"] for r in reversed(history) if "epsilon" in r), 0.0), "delta": chosen.delta}


def class_distribution(federation: Federation, most: int = 200) -> dict[str, Any]:
    """How many samples of each class the clients have (partition.json); of very many clients, an even choice."""
    schema, clients = federation.schema, federation.problem.clients
    choice = sorted({int(client) for client in np.linspace(0, clients - 1, min(clients, most))})
    counts = {client: known for client in choice if (known := federation.data.class_counts(client)) is not None}
    has_classes = schema.targets == "classes"
    class_names = list(schema.class_names) if has_classes else ["samples"]
    names = {"class_names": class_names} if class_names else {}
    shown = {"shown": list(counts), "counts": [list(each) for each in counts.values()]}
    if federation.data.names:
        names["client_names"] = [federation.data.names[client] for client in counts]
    return {"classes": schema.classes if has_classes else 1, "clients": clients, **shown, **names}


def read_metrics(path: Path) -> list[Record]:
    """The records of metrics.jsonl, up to a line that is none: the last one may have been cut off by a crash."""
    file = path / "metrics.jsonl"
    records: list[Record] = []
    for line in file.read_text("utf-8", "replace").splitlines() if file.exists() else ():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or type(record.get("round")) is not int:
            break
        records.append(record)
    return records


def write_metrics(path: Path, records: Iterable[Record]) -> None:
    """Write metrics.jsonl anew."""
    write_bytes(path / "metrics.jsonl", "".join(to_line(record) + "\n" for record in records).encode())


def chained(before: str, record: Record) -> str:
    """The digest of a line of metrics.jsonl and all lines before it, whose digest is `before`."""
    return checksum(f"{before}{to_line(record)}".encode())


def metrics_chain(records: Iterable[Record]) -> list[str]:
    """The digest of each line with all before it."""
    return list(itertools.accumulate(records, chained, initial=""))[1:]


def read_summary(path: Path) -> dict[str, Any] | None:
    """What summary.json says, if the run is done."""
    file = path / "summary.json"
    summary: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return summary


def _peak_rss_mb() -> float | None:
    """The most memory that this process has used; None where the system doesn't tell."""
    if resource is None:
        return None
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10))

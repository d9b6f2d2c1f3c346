"""What came out of a cell, as one JSON object: the numbers, the curves, the whole config."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynafed.config import Config
from dynafed.engine.files import write_bytes
from dynafed.engine.grid import config_digest
from dynafed.engine.summary import FINAL_ROUNDS, read_metrics, read_summary
from dynafed.engine.trust import imported_places, load_run_config
from dynafed.errors import UserError
from dynafed.report.load import load_run
from dynafed.report.text import setting
from dynafed.reproduce.cells import PlannedCell

Record = dict[str, Any]

STORED = (
    *("done", "rounds", "curve", "mean_curve", "seconds", "seconds_synthesis", "bytes_up", "bytes_down"),
    *("peak_rss_mb", "kernels", "versions", "evidence", "watch"),
)
"""What of a record comes from the run itself, not from the table that shows it."""


def cell_record(name: str, scale: str, planned: PlannedCell, stored: Mapping[str, Record]) -> Record:
    """The record of a cell; of one that hasn't run here, from `stored` results, if they have its config."""
    config, column = planned.cell.config, planned.column
    run = _read_run(planned) or stored.get(planned.digest) or {}
    record: Record = {
        "name": name,
        "column": column.name,
        "method": planned.method,
        "seed": config.seed,
        "scale": scale,
        "digest": planned.digest,
        "state": _state(run, planned),
        **({"reason": planned.missing} if planned.missing and not run else {}),
        **{key: run[key] for key in STORED if key in run},
        **_numbers(run.get("curve", []), "accuracy"),
        **_numbers(run.get("mean_curve", []), "mean_accuracy"),
        "scaled": {key: list(pair) for key, pair in planned.scaled.items()},
        "config": config.deciding(),
    }
    if column.target:
        record["target"] = column.target
        for curve, key in (("curve", "rounds_to_target"), ("mean_curve", "mean_rounds_to_target")):
            record[key] = next((at for at, value in run.get(curve, ()) if value >= column.target), None)
    return record


def earlier_records(file: Path, scale: str, records: Iterable[Record]) -> list[Record]:
    """The finished cells that other commands have left in a file, at the same scale; but for those given."""
    known = {record["digest"] for record in records}
    found = read_records([file]).values() if file.is_file() else ()
    return [record for record in found if record["scale"] == scale and record["digest"] not in known]


def variants(records: Iterable[Record]) -> dict[str, str]:
    """What tells a cell from the same method's other cells, but for the seed: by digest, empty if nothing does."""
    by_method: dict[str, list[Record]] = {}
    for record in records:
        by_method.setdefault(record["method"], []).append(record)
    found = {}
    for same in by_method.values():
        changed = [[f"{key} = {setting(ours)}" for key, (ours, _) in record["scaled"].items()] for record in same]
        for record, own in zip(same, changed, strict=True):
            found[record["digest"]] = ", ".join(text for text in own if not all(text in other for other in changed))
    return found


def write_records(file: Path, records: Iterable[Record]) -> None:
    """One JSON object a line; aside, then renamed."""
    write_bytes(file, "".join(json.dumps(record) + "\n" for record in records).encode())


def read_records(files: Sequence[Path]) -> dict[str, Record]:
    """The finished cells of JSON-lines files by the digest of their configs."""
    found: dict[str, Record] = {}
    for file in files:
        try:
            lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise UserError(f"{file} can't be read as JSON lines: {error}") from None
        for line in lines:
            if line.get("done"):
                # Nothing that a file from elsewhere names is imported for it.
                foreign = imported_places(line["config"])
                found[line["digest"] if foreign else config_digest(Config.from_dict(line["config"]))] = line
    return found


def _read_run(planned: PlannedCell) -> Record | None:
    """What a run's folder says; None if no round is done."""
    path = planned.cell.path
    rounds = read_metrics(path)
    if not rounds:
        return None
    summary = read_summary(path) or {}
    served = any("accuracy_raw" in record for record in rounds)
    record: Record = {
        "done": bool(summary),
        "rounds": len(rounds),
        "curve": _curve(rounds, "accuracy_raw" if served else "accuracy"),
        "mean_curve": _curve(rounds, "accuracy") if served else [],
        "seconds": sum(record["seconds"] for record in rounds),
        "bytes_up": sum(record["bytes_up"] + record.get("bytes_enrolment", 0) for record in rounds),
        "bytes_down": sum(record["bytes_down"] for record in rounds),
        "kernels": load_run_config(path, planned.cell.config).kernels,
        **{key: summary[key] for key in ("peak_rss_mb", "versions") if key in summary},
    }
    if (synthesis := load_run(path).total("seconds_synthesis")) is not None:
        record["seconds_synthesis"] = synthesis
    for one in rounds:
        if "scratch_accuracy" in one:
            record["evidence"] = {key: one[key] for key in ("scratch_accuracy", "cosine_by_segment")}
    if any("watch" in one for one in rounds):
        record["watch"] = [{"round": one["round"], **one["watch"]} for one in rounds if "watch" in one]
    return record


def _curve(rounds: Sequence[Mapping[str, Any]], key: str) -> list[list[float]]:
    """(round, accuracy) wherever it was measured."""
    return [
        [record["round"], round(record[key], 5)] for record in rounds if key in record and math.isfinite(record[key])
    ]


def _numbers(curve: Sequence[Sequence[float]], key: str) -> Record:
    last = [value for _, value in curve[-FINAL_ROUNDS:]]
    return {key: statistics.fmean(last), f"{key}_std": statistics.pstdev(last)} if last else {}


def _state(run: Record, planned: PlannedCell) -> str:
    if run.get("done"):
        return "done"
    if run:
        return f"{run['rounds']} of {planned.cell.config.rounds} rounds"
    return "no data" if planned.missing else "not run"

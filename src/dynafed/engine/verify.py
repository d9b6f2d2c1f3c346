"""Whether a run's folder is as it was written. The checksums have no key: they show accidents and careless edits.

A checkpoint binds what a resume reads: the config, the metrics so far, the clients' states. A run that is done leaves
`checksums.json`, which binds its results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynafed.callbacks import Record
from dynafed.config import parse_toml
from dynafed.engine import checkpoint
from dynafed.engine.checkpoint import RunState
from dynafed.engine.client_store import ClientStore
from dynafed.engine.files import check_links, checksum, write_json
from dynafed.engine.summary import metrics_chain, read_metrics
from dynafed.errors import UserError

CHECKSUMS = "checksums.json"

RESULTS = (
    *("config.toml", "partition.json", "metrics.jsonl", "summary.json", "synthesis.jsonl", "synthetic.safetensors"),
    *("model.safetensors", "model.json"),
)
"""Files that don't change any more when a run is done."""


def read_history(path: Path, state: RunState) -> tuple[RunState, list[Record]]:
    """The metrics of the rounds that a checkpoint has, if they are those that were written."""
    file = path / "metrics.jsonl"
    history = [record for record in read_metrics(path) if record["round"] <= state.round]
    if len(history) < state.round:
        raise UserError(f"{file} lacks rounds that the checkpoint has: it can't be resumed")
    digest = metrics_chain(history)[-1] if history else ""
    if state.metrics not in ("", digest):
        raise UserError(f"{file} was changed since the checkpoint: set it back, or start a new run")
    return replace(state, metrics=digest), history


def write_checksums(path: Path) -> None:
    """Bind the results of a run that is done."""
    found = {name: checksum((path / name).read_bytes()) for name in RESULTS if (path / name).is_file()}
    write_json(path / CHECKSUMS, {"files": found, "metrics": metrics_chain(read_metrics(path))})


def find_changes(path: Path) -> list[str]:
    """What is not as it was written, a sentence each; none if the folder is whole."""
    check_links(path)
    if not (path / "config.toml").is_file():
        raise UserError(f"{path} holds no run: it has no config.toml")
    return [*_changed_results(path), *_changed_state(path)]


def _changed_results(path: Path) -> list[str]:
    if not (path / CHECKSUMS).is_file():
        return []
    try:
        written = json.loads((path / CHECKSUMS).read_bytes())
        files, lines = dict(written["files"]), list(written["metrics"])
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{CHECKSUMS} can't be read"]
    found = []
    for name, expected in files.items():
        if not (path / name).is_file():
            found.append(f"{name} is missing")
        elif checksum((path / name).read_bytes()) != expected:
            found.append(f"{name} was changed{_changed_line(path, lines) if name == 'metrics.jsonl' else ''}")
    return found


def _changed_line(path: Path, lines: list[str]) -> str:
    now = metrics_chain(read_metrics(path))
    number = next((n for n, (a, b) in enumerate(zip(now, lines, strict=False), 1) if a != b), min(len(now), len(lines)))
    return f", from line {number} on"


def _changed_state(path: Path) -> list[str]:
    try:
        values = parse_toml((path / "config.toml").read_bytes(), "config.toml")
    except UserError as error:
        return [str(error)]
    found, newest = [], True
    for folder in checkpoint.found(path):
        body = checkpoint.read_body(folder)
        if body is None:
            found.append(f"checkpoint/{folder.name} is damaged")
            continue
        if newest:
            found += [f"config.toml: {change}" for change in checkpoint.changed_keys(body.get("config", {}), values)]
            found += _changed_metrics(path, body)
        if values.get("engine", "local") == "local":
            states = ClientStore(checkpoint.client_folder(path), 0, checkpoint.listing(body))
            damaged = states.find_damaged()
            found += [f"clients: {damaged} is missing or was changed"] if damaged else []
        newest = False
    return found


def _changed_metrics(path: Path, body: Mapping[str, Any]) -> list[str]:
    chain = metrics_chain(read_metrics(path))[: body["round"]]
    if len(chain) < body["round"]:
        return [f"metrics.jsonl: only {len(chain)} of {body['round']} rounds can be read"]
    same = not chain or body.get("metrics", chain[-1]) == chain[-1]
    return [] if same else [f"metrics.jsonl: a line up to round {body['round']} was changed"]

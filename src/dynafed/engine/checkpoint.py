"""Everything that changes during a run, saved so that a resumed run ends with the same bits.

A checkpoint is a folder `checkpoint/round-000010` with the tensors (safetensors) and the rest (JSON), both
checksummed, written aside and renamed. The newest one that is whole is the one that counts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynafed import tree
from dynafed.config import Config
from dynafed.engine.backend import Backend
from dynafed.engine.client_store import ClientStore, Listing
from dynafed.engine.federation import Federation
from dynafed.engine.files import checksum, remove, write_folder
from dynafed.errors import UserError
from dynafed.tree import Tree

log = logging.getLogger("dynafed")


@dataclass(frozen=True)
class RunState:
    """All that changes from round to round."""

    round: int
    """The last round that is done; 0 before the first."""
    model: Tree
    server: dict[str, Tree]
    """Each method's server state, by the method's name."""
    clients: ClientStore
    served: Tree | None = None
    """What is evaluated and served in the model's place, such as a running mean; None if it is the model itself."""
    norms: Tree = field(default_factory=dict)
    """How large the updates of the last rounds were; see `engine.guard`."""
    metrics: str = ""
    """The digest of all lines of metrics.jsonl so far."""

    @property
    def final_model(self) -> Tree:
        """The model to use: what is served."""
        return self.model if self.served is None else self.served

    @classmethod
    def initial(cls, federation: Federation, backend: Backend, path: Path) -> RunState:
        """The state before round 1."""
        problem = federation.problem
        model = problem.initial_model()
        server = {step.name: step.init_server(problem, model) for step in federation.methods.steps}
        return cls(0, model, server, _client_store(path, federation, backend))


def save(path: Path, federation: Federation, state: RunState) -> Path:
    """Write a checkpoint and delete those that are too old; returns its folder."""
    final = path / "checkpoint" / f"round-{state.round:06d}"
    before = read_body(final)
    if before and before.get("metrics") == state.metrics:
        return final
    content = {
        "round": state.round,
        "fingerprint": federation.fingerprint,
        "config": _binding(federation.config),
        "metrics": state.metrics,
        "clients": state.clients.write_listing(),
    }
    parts = {"model": state.model, "server": tree.nest(state.server), "norms": state.norms}
    if state.served is not None:
        parts["served"] = state.served
    tensors = tree.pack(tree.nest(parts))
    text = json.dumps(content | {"tensors": checksum(tensors)})
    outer = json.dumps({"checksum": checksum(text.encode()), "state": text})
    write_folder(final, {"state.safetensors": tensors, "state.json": outer.encode()})
    kept: dict[Path, Listing] = {}
    for folder in found(path):
        if folder <= final and len(kept) < federation.config.keep_checkpoints:
            if folder == final or state.clients.knows(folder):
                kept[folder] = {}
                continue
            if body := read_body(folder):
                kept[folder] = listing(body)
                continue
        remove(folder)
    state.clients.prune(kept)
    return final


def load(path: Path, federation: Federation, backend: Backend) -> RunState:
    """The newest checkpoint that is whole; the state before round 1 if there is none."""
    for folder in found(path):
        body = read_body(folder)
        if body is None:
            log.warning("%s is damaged; trying the one before", folder.name)
            continue
        if body["fingerprint"] != federation.fingerprint:
            raise UserError(
                f"{path} was run with other data, another split or another network: it can't be resumed with these"
            )
        for change in changed_keys(body.get("config", {}), _binding(federation.config)):
            raise UserError(f"{path / 'config.toml'}: {change}; set it back, or start a new run")
        clients = _client_store(path, federation, backend, listing(body))
        if file := clients.find_damaged():
            log.warning("%s misses a sound %s; trying the one before", folder.name, file)
            continue
        parts = read_parts(folder)
        states = tree.unnest(parts.get("server", {}))
        server = {step.name: states.get(step.name, {}) for step in federation.methods.steps}
        return RunState(
            round=body["round"],
            model=parts["model"],
            server=server,
            clients=clients,
            served=parts.get("served"),
            norms=parts.get("norms", {}),
            metrics=body.get("metrics", ""),
        )
    return RunState.initial(federation, backend, path)


def _binding(config: Config) -> dict[str, Any]:
    """What a checkpoint's run must still be when it is resumed; there may be more rounds."""
    plain: dict[str, Any] = json.loads(json.dumps(config.deciding()))
    return {key: value for key, value in plain.items() if key != "rounds"}


def changed_keys(before: Mapping[str, Any], values: Mapping[str, Any], section: str = "") -> list[str]:
    """The keys of a checkpoint's config, `before`, that have other values now, a sentence each.

    Keys that it lacks are no change: they came with a later version.
    """
    changes = []
    for key, value in before.items():
        now = json.loads(json.dumps(values.get(key)))
        if isinstance(value, dict) and isinstance(now, dict):
            changes += changed_keys(value, now, f"{section}{key}.")
        elif now != value:
            changes.append(f"{section}{key} is {now!r}, and the checkpoint was made with {value!r}")
    return changes


def found(path: Path) -> list[Path]:
    """The checkpoints' folders, newest first."""
    return sorted((path / "checkpoint").glob("round-*"), reverse=True)


def read_body(folder: Path) -> dict[str, Any] | None:
    """What a checkpoint's JSON says, if both of its files are what was written."""
    try:
        outer = json.loads((folder / "state.json").read_bytes())
        if checksum(outer["state"].encode()) != outer["checksum"]:
            return None
        body: dict[str, Any] = json.loads(outer["state"])
        sound = checksum((folder / "state.safetensors").read_bytes()) == body["tensors"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return body if sound else None


def read_parts(folder: Path) -> dict[str, Tree]:
    """A checkpoint's tensors: the model, the methods' server states (`server`), and what is served, if anything."""
    return tree.unnest(tree.unpack((folder / "state.safetensors").read_bytes()))


def listing(body: dict[str, Any]) -> Listing:
    """The clients' states that a checkpoint needs."""
    return {int(client): (made, digest) for client, (made, digest) in body["clients"].items()}


def _client_store(path: Path, federation: Federation, backend: Backend, needed: Listing | None = None) -> ClientStore:
    return backend.client_store(client_folder(path), federation.config.client_memory_mb * 2**20, needed)


def client_folder(path: Path) -> Path:
    """Where a run's clients' states are."""
    return path / "clients"

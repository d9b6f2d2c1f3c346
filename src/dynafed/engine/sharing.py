"""The first rounds that FedAvg and DynaFed have in common, computed once.

DynaFed is FedAvg until its trajectory is complete. The state of `fedavg+average` holds the last models, so one of its
early checkpoints has the whole beginning of the trajectory, and a DynaFed run can go on from there, with the same bits
as from round 1.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynafed import tree
from dynafed.callbacks import Callback, Record, RunContext
from dynafed.config import Config
from dynafed.engine import checkpoint
from dynafed.engine.backend import BACKENDS
from dynafed.engine.checkpoint import RunState
from dynafed.engine.federation import Federation
from dynafed.engine.files import lock_folder, make_folder, remove
from dynafed.engine.run import begin_folder
from dynafed.engine.summary import metrics_chain, read_metrics, write_metrics
from dynafed.engine.trust import load_run_config
from dynafed.methods import ServerRuntime
from dynafed.methods.average import AverageSettings
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.tree import Tree

SHARED = "shared"
"""The folder in a run's folder that keeps an early checkpoint."""

MAY_DIFFER = ("method", "rounds", "target_accuracy", "dynafed", "average")
"""Keys and sections that don't change the first rounds."""


class KeepFirstRounds(Callback):
    """Keeps the newest checkpoint that still has the models of all rounds, for runs that begin alike."""

    def on_checkpoint(self, run: RunContext, path: Path) -> None:
        """Copy it aside, then rename."""
        final = run.path / SHARED / path.name
        if run.round > _window(run.config) or final.exists():
            return
        aside = final.with_name(f".{path.name}")
        remove(aside)
        shutil.copytree(path, aside)
        aside.replace(final)
        for older in _kept(run.path)[1:]:
            remove(older)


def begins_alike(config: Config, source: Config) -> bool:
    """Whether a run of `config` can go on from the first rounds of a run of `source`."""
    parts, needed = config.method.split("+"), shared_rounds(config)
    same_mean = "average" not in parts or config.sections["average"] == source.sections.get("average")
    return (
        source.method == "fedavg+average"
        and "dynafed" in parts
        and {*parts} <= {"fedavg", "dynafed", "average"}
        and same_mean
        and needed <= _window(source)
        and needed < min(config.rounds, source.rounds)
        and config.client_state == "fresh"
        and not config.update_transforms
        and (config.schedule != "cosine" or config.rounds == source.rounds)
        and _beginning(config) == _beginning(source)
    )


def shared_rounds(config: Config) -> int:
    """How many rounds DynaFed has in common with FedAvg: those before the one that synthesizes."""
    return config.section("dynafed", DynaFedSettings).trajectory - 1


def start_from(config: Config, path: Path, source: Path) -> bool:
    """Make `path` a run of `config` that has done the rounds it shares with the run in `source`.

    False, and nothing is written, if `source` doesn't have them (any more).
    """
    if not _kept(source):
        return False
    federation = Federation.create(config)
    rounds = shared_rounds(config)
    (models, norms), history = _first_rounds(federation, source), read_metrics(source)[:rounds]
    numbers = [f"{number:06d}" for number in range(1, rounds + 1)]
    if len(history) < rounds or not models.keys() >= {*numbers}:
        return False
    backend = BACKENDS.load(federation.config.engine)(federation, path)
    with lock_folder(make_folder(path)):
        state = RunState.initial(federation, backend, path)
        for number in numbers:
            state = _replay(federation, state, models[number])
        norms = {part: medians[:rounds] for part, medians in norms.items()}
        records = history if state.served is not None else [_unserved(record) for record in history]
        write_metrics(path, records)
        state = replace(state, norms=norms, metrics=metrics_chain(records)[-1])
        checkpoint.save(path, federation, state)
        begin_folder(path, federation)
    return True


def _replay(federation: Federation, state: RunState, model: Tree) -> RunState:
    """The state after one more round whose average was `model`, which no step changes so early."""
    context = federation.server_side.context(state.round + 1, state.model, ServerRuntime())
    server, served = {}, None
    for step in federation.methods.steps:
        output = step.server_step(model, dict(state.server.get(step.name, {})), replace(context, average=model))
        server[step.name], served = output.state, output.served
    return RunState(state.round + 1, model, server, state.clients, served)


def _first_rounds(federation: Federation, source: Path) -> tuple[Mapping[str, Tree], Tree]:
    """The global models by round, and how large the updates were, of a run that kept them for others.

    Nothing if its data or kernels aren't the same. Norms that don't reach back to round 1 are left out.
    """
    if load_run_config(source, federation.config).kernels_key() != federation.config.kernels_key():
        return {}, {}
    for folder in _kept(source):
        body = checkpoint.read_body(folder)
        if body and body["fingerprint"] == federation.fingerprint and not body["clients"]:
            parts = checkpoint.read_parts(folder)
            norms = {part: medians for part, medians in parts.get("norms", {}).items() if len(medians) == body["round"]}
            return tree.unnest(tree.unnest(parts["server"])["average"]), norms
    return {}, {}


def _kept(path: Path) -> list[Path]:
    """The checkpoints that were kept for others, newest first."""
    return sorted((path / SHARED).glob("round-*"), reverse=True)


def _unserved(record: Record) -> Record:
    """A round's record as it is without `average`."""
    own: dict[str, Any] = {key: value for key, value in record.items() if not key.endswith("_raw")}
    return own | {key.removesuffix("_raw"): value for key, value in record.items() if key.endswith("_raw")}


def _window(config: Config) -> int:
    """How many of the last models the state of `average` holds."""
    chosen = config.section("average", AverageSettings)
    return chosen.window if chosen.kind == "last" and chosen.clients_get == "model" else 0


def _beginning(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.deciding().items() if key not in MAY_DIFFER}

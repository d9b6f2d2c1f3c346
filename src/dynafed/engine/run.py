"""A federated run, from the first round to the last: the file to read first.

sample clients -> Broadcast -> local_update (each client) -> Update -> server steps in order
               -> evaluate -> record -> checkpoint
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from dynafed import tree
from dynafed.config import Config
from dynafed.engine import checkpoint
from dynafed.engine.checkpoint import RunState
from dynafed.engine.cohort import sample
from dynafed.engine.files import make_folder, sole_owner, write_bytes, write_json
from dynafed.engine.plan import Plan
from dynafed.engine.server import Outcome, server_broadcast, server_enrol, server_update
from dynafed.engine.stopping import Stopped, StopRequest
from dynafed.engine.workers import Workers
from dynafed.errors import Interrupted, UserError, WorkerDied
from dynafed.execution import EXECUTION
from dynafed.messages import Update
from dynafed.methods import Host
from dynafed.models import Factory
from dynafed.report import write_report
from dynafed.tree import Tree
from dynafed.version import __version__

FINAL_ROUNDS = 5
"""The paper reports the mean accuracy of so many last rounds."""

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Flower and Ray read these variables when they are imported; a user's own choice stays."""

Record = dict[str, Any]
"""One line of metrics.jsonl."""

T = TypeVar("T")

Crew = Callable[[Plan, Path], Workers]
"""Makes the workers of a run, given its plan and its folder."""


class Progress:
    """Is told how a run gets on; this one keeps it to itself."""

    def round(self, record: Record, config: Config) -> None:
        """A round is done."""

    def busy(self, what: str, done: int, total: int) -> None:
        """A long piece of the server's work is so far."""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    path: Path
    plan: Plan
    state: RunState
    history: list[Record]
    """One record a round, as in metrics.jsonl."""
    summary: dict[str, Any]

    @property
    def final_accuracy(self) -> float:
        """The mean accuracy of the last five rounds that were evaluated."""
        return float(self.summary["final_accuracy"])

    @cached_property
    def model(self) -> nn.Module:
        """The trained global model, in evaluation mode."""
        self.plan.module.load_state_dict(self.state.model, strict=False)
        return self.plan.module.eval()


def run(
    config: Config,
    *,
    model: Factory | None = None,
    train: tuple[Any, Any] | None = None,
    test: tuple[Any, Any] | None = None,
    clients: Sequence[Any] | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    crew: Crew | None = None,
) -> Result:
    """Run federated learning as configured and leave the run's files in `out` (by default a new folder in `runs/`).

    Instead of a named dataset, `train` and `test` can be any pairs (x, y) of tensors or arrays; instead of a named
    split, `clients` a list of row numbers for each client; instead of a named model, `model` a factory of one.
    `crew` is for engines: who trains the clients, if it isn't the one that the config names.
    """
    plan = Plan.make(config, model=model, train=train, test=test, clients=clients)
    path = Path(out) if out is not None else _fresh_folder(plan.config)
    if (path / "config.toml").exists():
        raise UserError(f"{path} already holds a run: `{resume_command(path)}` continues it, or choose another folder")
    workers = (crew or _crew)(plan, path)
    make_folder(path)
    state = RunState.initial(plan, path)
    with sole_owner(path):
        write_json(path / "partition.json", _who_has_what(plan))
        write_bytes(path / "config.toml", plan.config.to_toml().encode())
        return _finish(plan, path, state, [], progress or Progress(), workers)


def resume(
    path: str | Path,
    *,
    model: Factory | None = None,
    train: tuple[Any, Any] | None = None,
    test: tuple[Any, Any] | None = None,
    clients: Sequence[Any] | None = None,
    changes: dict[str, Any] | None = None,
    progress: Progress | None = None,
    crew: Crew | None = None,
) -> Result:
    """Continue a run from its last checkpoint; it ends with the same bits as if it had never stopped.

    What was given to `run` in Python must be given again. `changes` may set how it is executed: `engine`, `workers`,
    `device`, `data_dir`; and more `rounds`.
    """
    path = Path(path)
    if not (path / "config.toml").is_file():
        raise UserError(f"{path} holds no run: it has no config.toml")
    before = Config.load(path / "config.toml")
    config = before.replace(**(changes or {}))
    for key in changes or {}:
        if key not in EXECUTION | {"rounds"}:
            raise UserError(f"'{key}' decides the run's result and can't change when it is resumed: start a new run")
    if config.rounds < before.rounds:
        raise UserError(f"rounds = {config.rounds} is less than the run's own {before.rounds}")
    plan = Plan.make(config, model=model, train=train, test=test, clients=clients)
    if before.kernels == "own" != plan.config.kernels:
        raise UserError(
            f"{path} was computed with our own kernels, which can't be compiled here, and torch's round otherwise: "
            "install a C++ compiler (or set CXX), or resume it on the machine where it began"
        )
    workers = (crew or _crew)(plan, path)
    with sole_owner(path):
        state = checkpoint.load(path, plan)
        history = [record for record in read_metrics(path) if record["round"] <= state.round]
        if len(history) < state.round:
            raise UserError(f"{path / 'metrics.jsonl'} lacks rounds that the checkpoint has: it can't be resumed")
        write_bytes(path / "config.toml", plan.config.to_toml().encode())
        return _finish(plan, path, state, history, progress or Progress(), workers)


def _crew(plan: Plan, path: Path) -> Workers:
    """Who trains the clients, by the config's `engine`."""
    if plan.config.engine == "local":
        return Workers(plan)
    # Nothing of what we do goes over the network, and nobody asked for it to be told about.
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    try:
        from dynafed.flower.simulation import Simulation
    except ModuleNotFoundError as error:
        raise UserError(f"engine = 'flower' needs {error.name}: pip install dynafed[flower]") from None
    return Simulation(plan, path)


def _finish(
    plan: Plan, path: Path, state: RunState, history: list[Record], progress: Progress, workers: Workers
) -> Result:
    """The rounds that are left, one after the other."""
    config = plan.config
    began = time.perf_counter()
    spent = sum(record["seconds"] for record in history)
    write_bytes(path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in history).encode())
    with workers, StopRequest() as stop, (path / "metrics.jsonl").open("a") as metrics:
        host = Host(path, stop.check, progress.busy)
        try:
            while state.round < config.rounds:
                state, record = one_round(plan, state, workers, host)
                line = json.dumps(record)
                history.append(json.loads(line))
                metrics.write(line + "\n")
                metrics.flush()
                if state.round % config.checkpoint_every == 0 or state.round == config.rounds:
                    checkpoint.save(path, plan, state)
                progress.round(record, config)
        except Stopped:
            checkpoint.save(path, plan, state)
            raise Interrupted(f"interrupted; continue with: {resume_command(path)}", path) from None
        except WorkerDied as error:
            checkpoint.save(path, plan, state)
            raise WorkerDied(f"{error}; continue with: {resume_command(path)}") from None
    summary = summarise(plan, history, spent + time.perf_counter() - began)
    write_json(path / "summary.json", summary)
    write_report([path])
    return Result(path, plan, state, history, summary)


def one_round(plan: Plan, state: RunState, workers: Workers, host: Host) -> tuple[RunState, Record]:
    """One communication round: the new state, and what is worth knowing about it."""
    config, round = plan.config, state.round + 1
    clock = time.perf_counter()
    record: Record = {"round": round, "lr": config.lr_at(round), "dropped": [], "rejected": []}
    record |= {"bytes_up": 0, "bytes_down": 0, "seconds_clients": 0.0}
    wait = Wait()
    if round == 1 and plan.methods.enrols:
        server, counts = server_enrol(plan, state.server, wait.on(workers.enrol()))
        state = dataclasses.replace(state, server=server)
        record |= counts
    broadcast = server_broadcast(plan, round, state.model, state.server)
    for attempt in range(1 + (config.max_repeats if config.failed_round == "repeat" else 0)):
        cohort = sample(plan, round, attempt)
        trained = wait.on(workers.train(broadcast, cohort.working, state.clients.load))
        outcome = server_update(plan, broadcast, state.server, _staged(trained, state, host), host)
        state.clients.commit(outcome.accepted)
        record["dropped"] += cohort.dropped
        record["rejected"] += outcome.rejected
        record["bytes_up"] += outcome.bytes_up
        record["bytes_down"] += broadcast.nbytes * (len(cohort.working) + len(cohort.dropped))
        record["seconds_clients"] += outcome.seconds_clients
        if outcome.accepted:
            break
    state = RunState(round, outcome.model, dict(outcome.server), state.clients)
    record |= {
        "clients": outcome.accepted,
        "repeats": attempt,
        **({} if outcome.accepted else {"skipped": True}),
        **outcome.metrics,
        "seconds_local": wait.seconds,
        "seconds_server": time.perf_counter() - clock - wait.seconds,
    }
    if round % config.eval_every == 0 or round == config.rounds:
        evaluated = time.perf_counter()
        record["accuracy"], record["loss"] = workers.evaluate(state.model)
        if outcome.model is not outcome.combined:
            record["accuracy_before_refine"], _ = workers.evaluate(outcome.combined)
        if outcome.accepted and config.watch:
            record["watch"] = _watched(plan, outcome)
        record["seconds_eval"] = time.perf_counter() - evaluated
    record["seconds"] = time.perf_counter() - clock
    return state, record


def _watched(plan: Plan, outcome: Outcome) -> Record:
    """The losses on watched clients' data: through local training, after the average, after refinement."""
    found = {}
    for client in plan.config.watch:
        x, y = plan.client_data(client)
        after = {
            name: plan.loss_on(tree.to(model, plan.device), x, y)
            for name, model in (("aggregated", outcome.combined), ("refined", outcome.model))
        }
        found[str(client)] = {"local": list(outcome.curves.get(client, ()))} | after
    return found


def _staged(trained: Iterator[tuple[Update, Tree]], state: RunState, host: Host) -> Iterator[Update]:
    """The updates as they come in; what their clients remember is put aside until it is known that they count."""
    host.check()
    for update, memory in trained:
        state.clients.stage(update.client, state.round + 1, memory)
        yield update
        host.check()


class Wait:
    """Counts the seconds that the server spends waiting for its clients."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on(self, source: Iterable[T]) -> Iterator[T]:
        """What comes from the clients, as it comes."""
        coming = iter(source)
        while True:
            asked = time.perf_counter()
            try:
                one = next(coming)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - asked
            yield one


def summarise(plan: Plan, history: list[Record], seconds: float) -> dict[str, Any]:
    """The run in a few numbers: summary.json."""
    config = plan.config
    evaluated = [record for record in history if "accuracy" in record]
    last = [record["accuracy"] for record in evaluated[-FINAL_ROUNDS:]]
    best = max(evaluated, key=lambda record: float(record["accuracy"]))
    reached = (record["round"] for record in evaluated if record["accuracy"] >= config.target_accuracy)
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "method": config.method,
        "dataset": plan.dataset.name,
        "seed": config.seed,
        "evaluated_on": config.evaluate,
        "final_accuracy": statistics.fmean(last),
        "final_std": statistics.pstdev(last),
        "best": best["accuracy"],
        "best_round": best["round"],
        "target_accuracy": config.target_accuracy or None,
        "rounds_to_target": next(reached, None) if config.target_accuracy else None,
        "rounds": len(history),
        "parameters": sum(plan.module.get_parameter(name).numel() for name in plan.trainable),
        "bytes_up": sum(record.get("bytes_up", 0) + record.get("bytes_enrolment", 0) for record in history),
        "bytes_down": sum(record["bytes_down"] for record in history),
        "seconds": seconds,
        "peak_rss_mb": usage / (2**20 if sys.platform == "darwin" else 2**10),
        "versions": {
            "dynafed": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def resume_command(path: Path) -> str:
    """What to type to continue the run in a folder."""
    return f"dynafed resume {shlex.quote(str(path))}"


def read_metrics(path: Path) -> list[Record]:
    """The records of metrics.jsonl; a last line that was cut off by a crash is left out."""
    file = path / "metrics.jsonl"
    records = []
    for line in file.read_text("utf-8", "replace").splitlines() if file.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def read_summary(path: Path) -> dict[str, Any] | None:
    """What summary.json says, if the run is done."""
    file = path / "summary.json"
    summary: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return summary


def _who_has_what(plan: Plan, most: int = 200) -> dict[str, Any]:
    """How many samples of each class the clients have; of very many clients, an even choice of them."""
    clients = len(plan.partition)
    shown = sorted({int(client) for client in np.linspace(0, clients - 1, min(clients, most))})
    labels = plan.dataset.train_y.numpy()
    counts = [np.bincount(labels[plan.partition[client]], minlength=plan.dataset.classes).tolist() for client in shown]
    return {"classes": plan.dataset.classes, "clients": clients, "shown": shown, "counts": counts}


def _fresh_folder(config: Config) -> Path:
    """A folder that doesn't exist yet, named after the moment and the work."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.method}-{config.dataset}".replace(":", "_").replace("/", "_")
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path

"""A federated run, from the first round to the last: the file to read first.

sample clients -> Broadcast -> local_update (each client) -> Update -> server steps in order
               -> evaluate -> record -> checkpoint
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import nn

from dynafed import tree
from dynafed.callbacks import Callback, CallbackList, Record, RunContext, make_callbacks
from dynafed.config import Config
from dynafed.engine import checkpoint
from dynafed.engine.backend import BACKENDS, Backend, BackendFactory
from dynafed.engine.checkpoint import RunState
from dynafed.engine.federation import Federation, sample_clients
from dynafed.engine.files import (
    lock_folder,
    make_folder,
    new_folder,
    remove,
    resume_command,
    to_line,
    write_bytes,
    write_json,
)
from dynafed.engine.server import RoundOutcome, server_broadcast, server_setup, server_update
from dynafed.engine.stopping import Stopped, StopSignal
from dynafed.engine.summary import chained, class_distribution, summarize, write_metrics
from dynafed.engine.trust import load_run_config
from dynafed.engine.verify import CHECKSUMS, read_history, write_checksums
from dynafed.errors import Interrupted, RunFailed, UserError
from dynafed.messages import Update
from dynafed.methods import ServerRuntime
from dynafed.models import Factory
from dynafed.predictor import DESCRIPTION, WEIGHTS, Predictor, describe
from dynafed.report import write_report
from dynafed.stages import counted, stage
from dynafed.synthesis.quality import evidence_for
from dynafed.tasks import LossFunction
from dynafed.terminal import with_progress
from dynafed.tree import Tree

T = TypeVar("T")

log = logging.getLogger("dynafed")

Callbacks = Sequence[Callback | Callable[..., Any]]


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run."""

    path: Path
    federation: Federation
    state: RunState
    history: list[Record]
    """One record a round, as in metrics.jsonl."""
    summary: dict[str, Any]

    def __repr__(self) -> str:
        metric = self.federation.problem.task.metric
        final, deviation = self.summary[f"final_{metric}"], self.summary["final_std"]
        scale, unit = (100, " %") if metric == "accuracy" else (1, "")
        return (
            f"Result({self.summary['method']} on {self.summary['dataset']}, {self.summary['rounds']} rounds: "
            f"{metric} {scale * final:.2f} ± {scale * deviation:.2f}{unit}, in {str(self.path)!r})"
        )

    def _repr_html_(self) -> str:
        from dynafed.notebook import result_html

        return result_html(self)

    @property
    def final_accuracy(self) -> float:
        """The mean accuracy of the last five rounds that were evaluated."""
        if "final_accuracy" not in self.summary:
            raise UserError(f"with loss = '{self.federation.config.loss}' there is no accuracy: look at result.summary")
        return float(self.summary["final_accuracy"])

    @cached_property
    def model(self) -> nn.Module:
        """The trained global model, in evaluation mode. It takes normalized samples; `predict` takes raw ones."""
        module = self.federation.problem.model
        module.load_state_dict(self.state.final_model, strict=False)
        return module.eval()

    @cached_property
    def predictor(self) -> Predictor:
        """The model with the normalization of its inputs and the labels of its classes."""
        return Predictor(self.model, self.federation.schema, self.federation.problem.task)

    def predict(self, x: Any) -> np.ndarray:
        """What the trained model takes raw samples for: labels as they were given, or numbers."""
        return self.predictor.predict(x)

    def evaluate(self, x: Any, y: Any) -> dict[str, float]:
        """The trained model's metrics on raw samples with their labels."""
        return self.predictor.evaluate(x, y)


@with_progress
def run(
    config: Config,
    *,
    model: Factory | None = None,
    train: Any = None,
    test: Any = None,
    clients: Any = None,
    server: Any = None,
    classes: int | Sequence[Any] | None = None,
    shape: Sequence[int] | None = None,
    target: str = "",
    loss: LossFunction | str | None = None,
    out: str | Path | None = None,
    callbacks: Callbacks = (),
    backend: BackendFactory | None = None,
    progress: bool | None = None,
) -> Result:
    """Run federated learning as configured and leave the run's files in `out` (by default a new folder in `runs/`).

    Instead of a named dataset, `train` and `test` can be any pairs (x, y) of tensors or arrays; instead of a named
    partition, `clients` a list of row numbers or a mask for each client; instead of a named model, `model` a factory of
    one. Or `clients` is a list or dict of each client's own data, without `train`: (x, y), a torch Dataset, a Hugging
    Face dataset, a DataFrame, a path (.npz, .csv, .parquet, a folder of images by class), or a function that returns
    one of these when the client is needed. Then `test` and `server`, samples for methods that need some on the server,
    can be any of these, too. `classes` (their number, or their labels in order), the `shape` of a sample and the
    `target` column needn't be found out if they are given. `loss` says what is learned: "cross_entropy", "bce" for any
    number of labels, "mse" for numbers, or a function of outputs and targets.
    `callbacks` follow the run: `Callback` objects, or functions of a round's record. `backend` trains the clients, in
    place of the one that the config names as `engine`. In a terminal or a notebook, a bar shows how far it is:
    `progress=False` silences it, `progress=True` prints a line every so often where there is neither.
    """
    federation = Federation.create(
        config,
        model=model,
        train=train,
        test=test,
        clients=clients,
        server=server,
        classes=classes,
        shape=shape,
        target=target,
        loss=loss,
    )
    told = make_callbacks(federation.config, callbacks)
    make_backend = backend or BACKENDS.load(federation.config.engine)
    path = Path(out) if out is not None else new_folder(f"{federation.config.method}-{federation.config.dataset}")
    chosen = make_backend(federation, path)
    with lock_folder(make_folder(path)):
        if (path / "config.toml").exists():
            raise UserError(
                f"{path} already holds a run: `{resume_command(path)}` continues it, or choose another folder"
            )
        state = RunState.initial(federation, chosen, path)
        begin_folder(path, federation)
        return _run_rounds(federation, path, state, [], told, chosen)


@with_progress
def resume(
    path: str | Path,
    *,
    model: Factory | None = None,
    train: Any = None,
    test: Any = None,
    clients: Any = None,
    server: Any = None,
    loss: LossFunction | str | None = None,
    changes: dict[str, Any] | None = None,
    callbacks: Callbacks = (),
    backend: BackendFactory | None = None,
    trust: bool | Config = False,
    progress: bool | None = None,
) -> Result:
    """Continue a run from its last checkpoint; it ends with the same bits as if it had never stopped.

    What was given to `run` in Python must be given again. `changes` may set how it is executed (`engine`, `workers`,
    `device`, `data_dir`, `callbacks`, ...), and more `rounds`. With more rounds, a cosine schedule changes its
    course, and what was the last round before stays evaluated. `progress` is as for `run`.

    A folder whose config names parts such as `package.module:Name` may run anybody's code: it is refused unless `trust`
    is True, or a config that names them, too.
    """
    path = Path(path)
    before = load_run_config(path, trust)
    config = before.replace(**(changes or {}))
    for key in changes or {}:
        if key != "rounds" and not config.is_execution(key):
            raise UserError(f"'{key}' decides the run's result and can't change when it is resumed: start a new run")
    if config.rounds < before.rounds:
        raise UserError(f"rounds = {config.rounds} is less than the run's own {before.rounds}")
    if config.rounds > before.rounds and config.schedule == "cosine":
        log.warning(
            "schedule = 'cosine' depends on rounds: the rates from here on are those of %d rounds", config.rounds
        )
    federation = Federation.create(
        config, model=model, train=train, test=test, clients=clients, server=server, loss=loss
    )
    if before.kernels == "own" and federation.config.kernels != "own":
        raise UserError(
            f"{path} was computed with our own kernels, which can't be compiled here (or DYNAFED_KERNELS forbids "
            "them), and torch's round otherwise: install a C++ compiler (or set CXX), or resume it on the machine "
            "where it began"
        )
    told = make_callbacks(federation.config, callbacks)
    chosen = (backend or BACKENDS.load(federation.config.engine))(federation, path)
    with lock_folder(path):
        state = checkpoint.load(path, federation, chosen)
        state, history = read_history(path, state)
        remove(path / CHECKSUMS)
        write_bytes(path / "config.toml", federation.config.to_toml().encode())
        return _run_rounds(federation, path, state, history, told, chosen)


def begin_folder(path: Path, federation: Federation) -> None:
    """Write what a run's folder has before round 1; config.toml comes last, because by it the folder is a run's."""
    write_json(path / "partition.json", class_distribution(federation))
    write_bytes(path / "config.toml", federation.config.to_toml().encode())


def _run_rounds(
    federation: Federation,
    path: Path,
    state: RunState,
    history: list[Record],
    callbacks: CallbackList,
    backend: Backend,
) -> Result:
    """The rounds that are left, one after the other; then the summary and the report."""
    config = federation.config
    began = time.perf_counter()
    spent = sum(record["seconds"] for record in history)
    run = RunContext(path, config, state.round, state.final_model, history)
    # In this order: a worker that is just starting must not die of Ctrl-C.
    with StopSignal() as stop, backend:
        runtime = ServerRuntime(
            folder=path,
            check_stop=stop.check,
            progress=partial(callbacks.tell, "on_progress", run),
            threads=federation.execution.server_threads,
            measure=evidence_for(federation),
        )
        try:
            callbacks.tell("on_run_begin", run)
            while state.round < config.rounds and not run.stopped:
                callbacks.tell("on_round_begin", run, state.round + 1)
                on_result = partial(callbacks.tell, "on_client_result", run)
                state, record = one_round(federation, state, backend, runtime, on_result)
                history.append(json.loads(to_line(record)))
                state = replace(state, metrics=chained(state.metrics, history[-1]))
                run.round, run.model = state.round, state.final_model
                callbacks.tell("on_round_end", run, history[-1])
                if state.round % config.checkpoint_every == 0 or state.round == config.rounds or run.stopped:
                    callbacks.tell("on_checkpoint", run, checkpoint.save(path, federation, state))
                check_failed_rounds(config.max_failed_rounds, history)
            check_failed_rounds(config.max_failed_rounds, history)  # a resumed run may have no rounds left
        except Exception as error:
            failure = _explained(error, path)
            try:
                write_metrics(path, history)  # a line may be what couldn't be written
                checkpoint.save(path, federation, state)
            except Exception as second:  # a full disk, say: what went wrong first still matters most
                failure.add_note(f"and the checkpoint couldn't be written: {type(second).__name__}: {second}")
            callbacks.tell_failure(run, failure)
            if failure is error:
                raise
            raise failure from None
    if not history:
        raise UserError(f"the run was stopped before its first round: {run.stopped}")
    summary = summarize(federation, history, spent + time.perf_counter() - began, run.stopped)
    write_json(path / DESCRIPTION, describe(config, federation.schema))
    write_bytes(path / WEIGHTS, tree.pack(state.final_model))
    write_json(path / "summary.json", summary)
    stage("writing the report")
    write_report([path])
    write_checksums(path)
    result = Result(path, federation, state, history, summary)
    callbacks.tell("on_run_end", run, result)
    return result


def check_failed_rounds(allowed: int, history: list[Record]) -> None:
    """End a run in which nothing gets through any more; `allowed` failed rounds in a row are too many."""
    last = history[-allowed:]
    if allowed and len(last) == allowed and all(record.get("skipped") for record in last):
        reasons = [f"client {each['client']}: {each['reason']}" for record in last for each in record["rejected"]]
        raise RunFailed(
            f"{allowed} rounds in a row failed (max_failed_rounds), the last is round {last[-1]['round']}"
            + (f"; {reasons[-1]}" if reasons else "; no client sent an update")
        )


def _explained(error: Exception, path: Path) -> BaseException:
    """What is raised in an error's place, with the command that continues the run."""
    if isinstance(error, Stopped):
        return Interrupted(f"interrupted; continue with: {resume_command(path)}", path)
    if isinstance(error, RunFailed):
        return type(error)(f"{error}; continue with: {resume_command(path)}")
    if not isinstance(error, UserError):
        error.add_note(f"continue with: {resume_command(path)}")
    return error


def one_round(
    federation: Federation,
    state: RunState,
    backend: Backend,
    runtime: ServerRuntime,
    on_result: Callable[[Update], None] = lambda update: None,
) -> tuple[RunState, Record]:
    """One communication round: the new state, and its line of metrics.jsonl."""
    config, side, round_num = federation.config, federation.server_side, state.round + 1
    began = time.perf_counter()
    record: Record = {"round": round_num, "lr": config.lr_at(round_num), "dropped": [], "rejected": []}
    record |= {"bytes_up": 0, "bytes_down": 0, "seconds_clients": 0.0}
    waiting = Stopwatch()
    if round_num == 1 and side.methods.sets_up:
        setups = counted("clients' set-up", backend.setup_clients(), federation.problem.clients)
        server, counts = server_setup(side, state.server, waiting.time(setups))
        state = replace(state, server=server)
        record |= counts
    broadcast = server_broadcast(side, round_num, state.model, state.server)
    norms = state.norms
    for attempt in range(1 + (config.max_repeats if config.failed_round == "repeat" else 0)):
        cohort = sample_clients(federation, round_num, attempt)
        trained = waiting.time(backend.train(broadcast, cohort.working, state.clients.load))
        updates = _stage_states(trained, state, runtime, on_result)
        outcome = server_update(side, broadcast, state.server, updates, runtime, norms)
        norms = outcome.norms
        record["dropped"] += cohort.dropped
        record["rejected"] += outcome.rejected
        record["bytes_up"] += outcome.bytes_up
        record["bytes_down"] += broadcast.nbytes * (len(cohort.working) + len(cohort.dropped))
        record["seconds_clients"] += outcome.seconds_clients
        if outcome.accepted:
            break
        state.clients.commit(())
    if attack := federation.attack:
        record["attackers"] = [client for client, _ in cohort.working if attack.acts(client, round_num)]
    names = federation.data.names
    record |= {
        "clients": outcome.accepted,
        **(
            {"client_names": [names[client] for client in outcome.accepted]} if (names := federation.data.names) else {}
        ),
        "repeats": attempt,
        **({} if outcome.accepted else {"skipped": True}),
        **outcome.metrics,
        "seconds_local": waiting.seconds,
        "seconds_server": time.perf_counter() - began - waiting.seconds,
    }
    if round_num % config.eval_every == 0 or round_num == config.rounds:
        evaluated = time.perf_counter()
        metric = federation.problem.task.metric
        record |= backend.evaluate(outcome.served or outcome.model)
        if outcome.served is not None:
            raw = backend.evaluate(outcome.model)
            record |= {f"{name}_raw": value for name, value in raw.items()}
        if outcome.model is not outcome.average:
            record[f"{metric}_before_refine"] = backend.evaluate(outcome.average)[metric]
        if attack:
            record |= attack.success(federation, outcome.served or outcome.model)
        if outcome.accepted and config.watch:
            record["watch"] = _watched_losses(federation, outcome)
        record["seconds_eval"] = time.perf_counter() - evaluated
    record["seconds"] = time.perf_counter() - began
    state.clients.commit(outcome.accepted)  # last: whatever fails before leaves the old state as it was
    server, served = dict(outcome.server), outcome.served
    return RunState(round_num, outcome.model, server, state.clients, served, norms, state.metrics), record


def _stage_states(
    trained: Iterator[tuple[Update, Tree]],
    state: RunState,
    runtime: ServerRuntime,
    on_result: Callable[[Update], None],
) -> Iterator[Update]:
    """The updates as they arrive; their clients' new states are held back until it is known that they count."""
    runtime.check_stop()
    for update, client_state in trained:
        state.clients.stage(update.client, state.round + 1, client_state)
        on_result(update)
        yield update
        runtime.check_stop()


def _watched_losses(federation: Federation, outcome: RoundOutcome) -> Record:
    """The losses on watched clients' data: through local training, after the average, after the server steps."""
    problem, found = federation.problem, {}
    for client in federation.config.watch:
        view = federation.client(client)
        after = {
            name: problem.mean_loss(tree.to(model, problem.device), view.x, view.y)
            for name, model in (("aggregated", outcome.average), ("refined", outcome.model))
        }
        found[str(client)] = {"local": list(outcome.curves.get(client, ()))} | after
    return found


class Stopwatch:
    """Counts the seconds that the server waits for its clients."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, source: Iterable[T]) -> Iterator[T]:
        """The items of `source` as they arrive."""
        items = iter(source)
        while True:
            asked = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - asked
            yield item

"""A federated run, from the first round to the last: the file to read first.

sample clients -> Broadcast -> local_update (each client) -> Update -> server steps in order
               -> evaluate -> record -> checkpoint
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dynafed import tree
from dynafed.callbacks import Callback, CallbackList, Record, RunContext, make_callbacks
from dynafed.config import Config
from dynafed.engine import checkpoint
from dynafed.engine.backend import BACKENDS, Backend, BackendFactory
from dynafed.engine.checkpoint import RunState
from dynafed.engine.evaluation import evaluate_round
from dynafed.engine.federation import Federation, sample_clients
from dynafed.engine.files import (
    lock_folder,
    make_folder,
    new_folder,
    remove,
    to_line,
    write_bytes,
    write_json,
)
from dynafed.engine.result import Result
from dynafed.engine.server import server_broadcast, server_setup, server_update
from dynafed.engine.stopping import StopSignal, check_failed_rounds, explain_failure
from dynafed.engine.summary import chained, class_distribution, summarize, write_metrics
from dynafed.engine.trust import load_run_config, resume_command
from dynafed.engine.verify import CHECKSUMS, read_history, write_checksums
from dynafed.errors import UserError
from dynafed.messages import Update
from dynafed.methods import ServerRuntime
from dynafed.models import Factory
from dynafed.predictor import DESCRIPTION, WEIGHTS, describe
from dynafed.report import write_report
from dynafed.secure_aggregation import invite
from dynafed.stages import counted, stage
from dynafed.synthesis.quality import evidence_for
from dynafed.tasks import LossFunction
from dynafed.terminal import with_progress
from dynafed.tree import Tree

T = TypeVar("T")

log = logging.getLogger("dynafed")

Callbacks = Sequence[Callback | Callable[..., Any]]


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
    if config.kernels_version not in (0, before.kernels_version):
        raise UserError(
            f"kernels_version = {config.kernels_version}: the run began with {before.kernels_version}, which rounds "
            "otherwise: start a new run"
        )
    config = config.replace(kernels_version=before.kernels_version)
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
            check_failed_rounds(config.max_failed_rounds, history, ended=not run.stopped)  # also if none were left
        except Exception as error:
            failure = explain_failure(error, path)
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
        sampled = [*cohort.dropped, *(client for client, _ in cohort.working)]
        sent = invite(config, federation.problem.seeds, broadcast, sampled, attempt)
        trained = waiting.time(backend.train(sent, cohort.working, state.clients.load))
        updates = _stage_states(trained, state, runtime, on_result)
        outcome = server_update(side, sent, state.server, updates, runtime, norms)
        norms = outcome.norms
        record["dropped"] += cohort.dropped
        record["rejected"] += outcome.rejected
        record["bytes_up"] += outcome.bytes_up
        record["bytes_down"] += sent.nbytes * len(sampled) + outcome.bytes_down
        record["seconds_clients"] += outcome.seconds_clients
        if outcome.accepted:
            break
        state.clients.commit(())
    if attack := federation.attack:
        record["attackers"] = [client for client, _ in cohort.working if attack.acts(client, round_num)]
    names = federation.data.names
    record |= {
        "clients": outcome.accepted,
        **({"client_names": [names[client] for client in outcome.accepted]} if names else {}),
        "repeats": attempt,
        **({} if outcome.accepted else {"skipped": True}),
        **outcome.metrics,
        "seconds_local": waiting.seconds,
        "seconds_server": time.perf_counter() - began - waiting.seconds,
    }
    if round_num % config.eval_every == 0 or round_num == config.rounds:
        record |= evaluate_round(federation, backend, outcome)
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

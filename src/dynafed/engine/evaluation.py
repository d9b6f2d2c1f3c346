"""How good a model is: on a split that the server has, or on what every client holds out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynafed import tree
from dynafed.callbacks import Record
from dynafed.engine.backend import Backend
from dynafed.engine.federation import Federation
from dynafed.engine.server import RoundOutcome
from dynafed.problem import BATCH, Problem
from dynafed.stages import counted
from dynafed.tasks import Tally, Task, add_up
from dynafed.tree import Tree

Part = tuple[str, int, int]
"""A part of an evaluation: ("split", start, stop) of the server's samples, or ("client", number, 0)."""

MOST_SHOWN = 50
"""With more classes than these, a record has no confusion matrix."""


def evaluate(federation: Federation, model: Tree) -> dict[str, Any]:
    """A model's metrics, computed in this process."""
    parts = evaluation_parts(federation)
    return metrics(federation, parts, (evaluate_part(federation, model, *part) for part in parts))


def evaluate_round(federation: Federation, backend: Backend, outcome: RoundOutcome) -> Record:
    """A round's metrics: of what is served, and of the model before the mean and before the server steps."""
    began = time.perf_counter()
    served, metric = outcome.served or outcome.model, federation.problem.task.metric
    record: Record = dict(backend.evaluate(served))
    if outcome.served is not None:
        record |= {f"{name}_raw": value for name, value in backend.evaluate(outcome.model).items()}
    if outcome.model is not outcome.average:
        record[f"{metric}_before_refine"] = backend.evaluate(outcome.average)[metric]
    if federation.attack:
        record |= federation.attack.success(federation, served)
    if outcome.accepted and federation.config.watch:
        record["watch"] = _watched_losses(federation, outcome)
    return record | {"seconds_eval": time.perf_counter() - began}


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


def evaluation_parts(federation: Federation) -> list[Part]:
    """What is evaluated, in parts that can be done apart."""
    size = federation.evaluation_size()
    parts: list[Part] = [("split", start, min(start + BATCH, size)) for start in range(0, size, BATCH)]
    if federation.config.evaluate == "clients":
        parts += [("client", client, 0) for client in evaluated_clients(federation)]
    return parts


def evaluated_clients(federation: Federation) -> list[int]:
    """The clients whose held-out samples count: all, or as many as the config says, drawn by the seed."""
    clients, most = federation.problem.clients, federation.config.eval_clients
    if not most or most >= clients:
        chosen: Sequence[int] = range(clients)
    else:
        chosen = np.sort(federation.problem.seeds.rng("evaluate").choice(clients, most, replace=False)).tolist()
    return [client for client in chosen if federation.data.client_size(client) not in (0, 1)]


def evaluate_part(federation: Federation, model: Tree, kind: str, first: int, stop: int) -> Tally:
    """One part's tally."""
    held = federation.evaluation_data(first, stop) if kind == "split" else federation.held_out(first)
    return tally(federation.problem, model, *held)


@torch.no_grad()
def tally(problem: Problem, model: Tree, x: Tensor, y: Tensor) -> Tally:
    """What a model does on these samples."""
    problem.network.eval()
    weights = tree.to(model, problem.device)
    parts = zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True)
    return add_up([problem.task.tally(problem.infer(weights, some), wanted) for some, wanted in parts])


def empty_tally(problem: Problem) -> Tally:
    """The tally of no samples: what each tally of this problem looks like."""
    outputs = torch.zeros(0, problem.classes)
    classes = problem.task.targets == "classes"
    return problem.task.tally(outputs, torch.zeros(0, dtype=torch.int64) if classes else outputs)


def metrics(federation: Federation, parts: Sequence[Part], tallies: Iterable[Tally]) -> dict[str, Any]:
    """The metrics of all parts together, for a round's record."""
    task = federation.problem.task
    split: list[Tally] = []
    clients: dict[int, Tally] = {}
    for (kind, number, _), found in zip(parts, counted("evaluation", tallies, len(parts)), strict=True):
        if kind == "split":
            split.append(found)
        elif found.samples:
            clients[number] = found
    if federation.config.evaluate != "clients":
        return dict(task.metrics(add_up(split)))
    names = federation.data.names
    named = {names[client] if names else str(client): found for client, found in clients.items()}
    return client_metrics(task, named) | (_on_the_server(task, add_up(split)) if split else {})


def client_metrics(task: Task, clients: dict[str, Tally]) -> dict[str, Any]:
    """The metrics of clients' own samples: of all together, of each, of each class, and of the worst tenth."""
    together, each = add_up(clients.values()), {name: task.metrics(found) for name, found in clients.items()}
    found: dict[str, Any] = dict(task.metrics(together))
    for metric in dict.fromkeys((task.metric, "loss")):
        found[f"{metric}_per_client"] = {name: one[metric] for name, one in each.items()}
    ordered = sorted((one[task.metric] for one in each.values()), reverse=not task.larger_is_better)
    worst = ordered[: -(-len(ordered) // 10)]
    found[f"{task.metric}_worst_tenth"] = sum(worst) / len(worst)
    if together.confusion is not None:
        found["accuracy_per_class"] = _per_class(together.confusion)
    return found


def _on_the_server(task: Task, found: Tally) -> dict[str, Any]:
    """The same on the server's own test samples, and which class is taken for which."""
    named: dict[str, Any] = {f"{name}_test": value for name, value in task.metrics(found).items()}
    if found.confusion is not None and len(found.confusion) <= MOST_SHOWN:
        named["confusion"] = found.confusion.tolist()
    return named


def _per_class(confusion: Tensor) -> list[float | None]:
    """The share of each class that is recognized; None for a class without samples."""
    rows = zip(confusion.diagonal().tolist(), confusion.sum(1).tolist(), strict=True)
    return [right / total if total else None for right, total in rows]

"""The only server round: check every update, combine the sound ones, then let each method refine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynafed import tree
from dynafed.engine.plan import Plan
from dynafed.messages import Broadcast, Update, enrolment_flaw, flaw
from dynafed.methods import Host, Mean, Server
from dynafed.tree import Tree


@dataclass(frozen=True)
class Outcome:
    """What the server has after a round's updates: what it had before, if too few of them were sound."""

    combined: Tree
    """The average, before any refinement."""
    model: Tree
    """The next global model; the very same object as `combined` if no method changed it."""
    server: Mapping[str, Tree]
    accepted: list[int]
    """Whose updates are in the model; nobody's, if there is no new one."""
    rejected: list[dict[str, Any]]
    bytes_up: int
    """All that was sent up, sound or not."""
    seconds_clients: float
    """The clients' own time, added up."""
    metrics: dict[str, Any] = field(default_factory=dict)
    curves: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """How the losses of watched clients went in local training."""


def server_broadcast(plan: Plan, round: int, model: Tree, server: Mapping[str, Tree]) -> Broadcast:
    """What the clients of a round get."""
    extras = {step.name: step.broadcast(server.get(step.name, {})) for step in plan.methods.steps}
    return Broadcast(round, model, {name: extra for name, extra in extras.items() if extra})


def server_enrol(
    plan: Plan, server: Mapping[str, Tree], enrolments: Iterable[Tree]
) -> tuple[dict[str, Tree], dict[str, int]]:
    """What the clients send once, before round 1, becomes part of the server's state; and how much it was.

    An enrolment that isn't what the method expects, or holds NaN or infinity, is left out.
    """
    method = plan.methods.client
    layout = method.sends_once(plan)
    counts = {"bytes_enrolment": 0, "enrolments_rejected": 0}

    def sound() -> Iterator[Tree]:
        for enrolment in enrolments:
            counts["bytes_enrolment"] += tree.nbytes(enrolment)
            if enrolment_flaw(enrolment, layout):
                counts["enrolments_rejected"] += 1
            else:
                yield enrolment

    state = method.admit(dict(server.get(method.name, {})), plan, sound())
    return {**server, method.name: state}, counts


def server_update(
    plan: Plan, broadcast: Broadcast, server: Mapping[str, Tree], updates: Iterable[Update], host: Host | None = None
) -> Outcome:
    """One round's updates become the next global model.

    `updates` may be a stream: nothing but a running sum is held, unless a method needs each model. With fewer sound
    updates than `min_survivors`, everything stays as it was.
    """
    combiner = plan.methods.combiner(plan)
    layout = plan.methods.layout(plan)
    extras: dict[str, Mean] = {}
    kept: list[Update] = []
    accepted: list[int] = []
    curves: dict[int, tuple[float, ...]] = {}
    rejected: list[dict[str, Any]] = []
    loss = examples = seconds = 0.0
    up = 0
    for update in updates:
        up += update.nbytes
        seconds += update.seconds
        if reason := flaw(update, broadcast, layout):
            rejected.append({"client": update.client, "reason": reason})
            continue
        combiner.add(update)
        for name, extra in update.extras.items():
            extras.setdefault(name, Mean("uniform")).add_tree(dict(extra))
        if plan.methods.keeps_updates:
            kept.append(update)
        accepted.append(update.client)
        if update.curve:
            curves[update.client] = update.curve
        loss += update.loss * update.examples
        examples += update.examples
    if len(accepted) < plan.config.min_survivors:
        return Outcome(broadcast.model, broadcast.model, server, [], rejected, up, seconds)
    combined = model = combiner.result()
    metrics: dict[str, Any] = {"train_loss": loss / examples}
    states = {}
    for step in plan.methods.steps:
        refined = step.refine(
            model,
            dict(server.get(step.name, {})),
            Server(
                plan=plan,
                round=broadcast.round,
                before=broadcast.model,
                combined=combined,
                extras=extras[step.name].result() if step.name in extras else {},
                participants=len(accepted),
                updates=kept,
                host=host or Host(),
            ),
        )
        model = refined.model
        states[step.name] = refined.state
        metrics |= refined.metrics
    return Outcome(combined, model, states, accepted, rejected, up, seconds, metrics, curves)

"""What the methods send beside the model, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dynafed import tree
from dynafed.engine.plan import Plan
from dynafed.engine.server import server_broadcast, server_enrol
from dynafed.tree import Tree


@dataclass(frozen=True)
class Traffic:
    """Bytes beside the model."""

    up: int
    """From each sampled client, in each round."""
    down: int
    """To each sampled client, in each round."""
    once: int
    """From all clients together, before round 1."""


def enrolments(plan: Plan) -> Iterator[Tree]:
    """What each client that has data sends once, before round 1."""
    for client in np.flatnonzero(plan.partition.sizes):
        yield plan.methods.client.enrol(plan, int(client))


def traffic(plan: Plan) -> Traffic:
    """What the plan's methods are going to send, found without training."""
    model = plan.initial_model()
    server, once = {step.name: step.initial(plan, model) for step in plan.methods.steps}, 0
    if plan.methods.enrols:
        server, counts = server_enrol(plan, server, enrolments(plan))
        once = counts["bytes_enrolment"]
    down = server_broadcast(plan, 1, {}, server).nbytes
    return Traffic(tree.nbytes(tree.nest(plan.methods.layout(plan))), down, once)

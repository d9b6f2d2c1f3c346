"""What the methods send beside the model, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from dynafed import tree
from dynafed.engine.backend import setup_clients
from dynafed.engine.federation import Federation
from dynafed.engine.server import server_broadcast, server_setup


@dataclass(frozen=True)
class Traffic:
    """Bytes beside the model."""

    up: int
    """From each sampled client, in each round."""
    down: int
    """To each sampled client, in each round."""
    once: int
    """From all clients together, before round 1."""


def traffic(federation: Federation) -> Traffic:
    """What the methods are going to send, found without training."""
    side, problem = federation.server_side, federation.problem
    model = problem.initial_model()
    server, once = {step.name: step.init_server(problem, model) for step in side.methods.steps}, 0
    if side.methods.sets_up:
        server, counts = server_setup(side, server, setup_clients(federation))
        once = counts["bytes_enrolment"]
    down = server_broadcast(side, 1, {}, server).nbytes
    return Traffic(tree.nbytes(tree.nest(side.methods.extras_spec(problem))), down, once)

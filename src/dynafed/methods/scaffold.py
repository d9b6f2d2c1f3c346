"""SCAFFOLD: each step is corrected by how a client's gradient differs from everybody's.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from dynafed.methods.base import Finished, Local, Method, Needs, Refined, Server
from dynafed.settings import setting
from dynafed.tree import Tree, map_tensors, only

if TYPE_CHECKING:
    from dynafed.engine.plan import Plan

CHUNK = 256
"""Samples at a time in the gradient at the global model."""


@dataclass(frozen=True)
class ScaffoldSettings:
    """Section `scaffold`."""

    option: str = setting(
        "auto",
        "a client's new control variate: I, its gradient at the global model; II, from its own steps, which must be "
        "plain SGD; auto takes II with optimizer = sgd, else I",
        choices=("auto", "I", "II"),
    )


class Scaffold(Method):
    """Follows gradient + c - c_i, with the server's control variate c and the client's own c_i, both zero at first."""

    name = "scaffold"
    summary = "corrects each step by control variates of client and server"
    citation = "Karimireddy et al., ICML 2020"
    needs = Needs(client_memory=True)
    Settings = ScaffoldSettings
    settings: ScaffoldSettings

    @property
    def option(self) -> str:
        """The option, with auto resolved."""
        chosen = self.settings.option
        return chosen if chosen != "auto" else "II" if self.config.optimizer == "sgd" else "I"

    def refuses(self, others: Sequence[Method]) -> str | None:
        """Option II takes (w_global - w_i) / (K * lr) for a mean gradient, which only plain SGD makes true."""
        if self.option == "II" and self.config.optimizer != "sgd":
            return (
                f"scaffold.option = 'II' needs optimizer = 'sgd', not '{self.config.optimizer}': "
                "set scaffold.option to 'I' or 'auto'"
            )
        return None

    def begin(self, local: Local) -> Tree:
        """The correction c - c_i, the same in every step."""
        return map_tensors(torch.sub, local.extras, self._own(local))

    def adjust(self, grads: Tree, params: Tree, local: Local) -> Tree:
        """Correct the gradient."""
        return map_tensors(torch.add, grads, local.carry)

    def finish(self, params: Tree, local: Local) -> Finished:
        """Remember the new c_i, and send its change."""
        if self.option == "I":
            new = _gradient(local)
        else:
            span = local.steps * local.lr
            new = map_tensors(
                lambda correction, start, w: (start - w) / span - correction, local.carry, local.start, params
            )
        return Finished(memory=new, extras=map_tensors(torch.sub, new, self._own(local)))

    def sends(self, plan: Plan) -> Tree:
        """One number for each trainable parameter."""
        return only(plan.initial_model(), plan.trainable)

    def initial(self, plan: Plan, model: Tree) -> Tree:
        """Nobody has said anything yet: c = 0."""
        return map_tensors(torch.zeros_like, only(model, plan.trainable))

    def broadcast(self, state: Tree) -> Tree:
        """The server's control variate."""
        return state

    def refine(self, model: Tree, state: Tree, server: Server) -> Refined:
        """Move c by the participants' mean change, scaled by their share of all clients."""
        share = server.participants / len(server.plan.partition)
        return Refined(model, map_tensors(lambda c, change: c + share * change, state, server.extras))

    def _own(self, local: Local) -> Tree:
        return local.memory or map_tensors(torch.zeros_like, local.start)


def _gradient(local: Local) -> Tree:
    """The gradient of the loss at the global model over all of the client's data."""
    start = {name: tensor.clone().requires_grad_() for name, tensor in local.start.items()}
    total = map_tensors(torch.zeros_like, local.start)
    parts = -(-len(local.y) // CHUNK)
    for x, y in zip(torch.tensor_split(local.x, parts), torch.tensor_split(local.y, parts), strict=True):
        loss = F.cross_entropy(local.forward(start | local.buffers, x), y, reduction="sum") / len(local.y)
        grads = torch.autograd.grad(loss, list(start.values()))
        for name, grad in zip(start, grads, strict=True):
            total[name] += grad
    return total

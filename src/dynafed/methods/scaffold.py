"""SCAFFOLD: each step is corrected by how a client's gradient differs from everybody's.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dynafed.methods.base import (
    AffineCorrection,
    ClientContext,
    ClientOutput,
    Method,
    Needs,
    ServerContext,
    ServerOutput,
)
from dynafed.problem import Problem
from dynafed.settings import setting
from dynafed.tree import Tree, map_tensors, only

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
        if self.settings.option != "auto":
            return str(self.settings.option)
        corrected = any(other.corrects_gradients() for other in self.composed_with())
        return "II" if self.config.optimizer == "sgd" and not corrected else "I"

    def incompatibility(self, others: Sequence[Method]) -> str | None:
        """Option II takes (w_global - w_i) / (K * lr) for a mean gradient, which only plain SGD makes true.

        Option I takes the gradient of the plain loss.
        """
        if self.option == "II" and self.config.optimizer != "sgd":
            return (
                f"scaffold.option = 'II' needs optimizer = 'sgd', not '{self.config.optimizer}': "
                "set scaffold.option to 'I' or 'auto'"
            )
        for other in others:
            if self.option == "II" and other.corrects_gradients():
                return f"scaffold.option = 'II' would take {other.name}'s correction for a gradient: set it to 'I'"
            if self.option == "I" and other.changes_loss():
                return (
                    f"scaffold.option = 'I' takes the gradient of the plain loss, not {other.name}'s: "
                    "set optimizer = 'sgd' and scaffold.option = 'II'"
                )
        return None

    def prepare(self, client: ClientContext) -> Tree:
        """The correction c - c_i, the same in every step."""
        return map_tensors(torch.sub, client.extras, self._own(client))

    def affine_correction(self, client: ClientContext) -> AffineCorrection:
        """c - c_i."""
        return AffineCorrection(shift=client.prepared)

    def finish(self, params: Tree, client: ClientContext) -> ClientOutput:
        """Remember the new c_i, and send its change."""
        if self.option == "I":
            at_global = client.fused_gradient
            new = at_global(client.global_params) if at_global else _gradient(client)
        else:
            span = client.steps * client.lr
            new = map_tensors(
                lambda correction, start, w: (start - w) / span - correction,
                client.prepared,
                client.global_params,
                params,
            )
        return ClientOutput(state=new, extras=map_tensors(torch.sub, new, self._own(client)))

    def extras_spec(self, problem: Problem) -> Tree:
        """One number for each trainable parameter."""
        return only(problem.initial_model(), problem.trainable)

    def init_server(self, problem: Problem, model: Tree) -> Tree:
        """Nobody has said anything yet: c = 0."""
        return map_tensors(torch.zeros_like, only(model, problem.trainable))

    def broadcast(self, state: Tree) -> Tree:
        """The server's control variate."""
        return state

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        """Move c by the participants' mean change, scaled by their share of all clients."""
        share = server.participants / server.problem.clients
        return ServerOutput(model, map_tensors(lambda c, change: c + share * change, state, server.extras))

    def _own(self, client: ClientContext) -> Tree:
        return client.state or map_tensors(torch.zeros_like, client.global_params)


def _gradient(client: ClientContext) -> Tree:
    """The gradient of the loss at the global model over all of the client's data."""
    start = {name: tensor.clone().requires_grad_() for name, tensor in client.global_params.items()}
    total = map_tensors(torch.zeros_like, client.global_params)
    parts = -(-len(client.y) // CHUNK)
    for x, y in zip(torch.tensor_split(client.x, parts), torch.tensor_split(client.y, parts), strict=True):
        loss = client.task.sum_loss(client.forward(start | client.global_buffers, x), y) / len(client.y)
        grads = torch.autograd.grad(loss, list(start.values()))
        for name, grad in zip(start, grads, strict=True):
            total[name] += grad
    return total

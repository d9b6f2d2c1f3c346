"""FedDyn: a client's loss is bent so that its optimum agrees with the global one.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.
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


@dataclass(frozen=True)
class FedDynSettings:
    """Section `feddyn`."""

    alpha: float = setting(0.01, "strength of the regularization; the paper takes 0.1, 0.01 or 0.001", low=0)


class FedDyn(Method):
    """Adds alpha/2 * ||w - w_global||^2 - <g_i, w> to the local loss; g_i is what the client's gradient was last time.

    As in FedProx, only the gradient of these terms is computed. The server adds what its clients' models are always
    short of, -h/alpha, where h sums alpha times every participant's way, divided by the number of all clients. Where
    something else stands in the average's place (`feddyn+median`), that tells the participants' mean way, too.
    """

    name = "feddyn"
    summary = "adds a linear and a quadratic term to each client's loss, and the drift they miss to the average"
    citation = "Acar et al., ICLR 2021"
    needs = Needs(client_memory=True)
    Settings = FedDynSettings
    settings: FedDynSettings
    zero_means_fedavg = ("alpha",)

    def incompatibility(self, others: Sequence[Method]) -> str | None:
        """h is a uniform mean over clients, and so must be the average; a client's optimum has only FedDyn's terms."""
        if self.config.weighting != "uniform":
            return "feddyn's clients count alike: weighting = 'uniform'"
        second = [other.name for other in others if other.corrects_gradients()]
        return (
            f"feddyn's state is wrong where {second[0]} corrects the gradient, too; take one of them"
            if second
            else None
        )

    def prepare(self, client: ClientContext) -> Tree:
        """The client's last gradient with the sign that the correction has, -g_i; zero at first."""
        return map_tensors(torch.neg, client.state or map_tensors(torch.zeros_like, client.global_params))

    def affine_correction(self, client: ClientContext) -> AffineCorrection:
        """The gradient of both terms."""
        return AffineCorrection(self.settings.alpha, client.global_params, client.prepared)

    def finish(self, params: Tree, client: ClientContext) -> ClientOutput:
        """At the optimum of the bent loss, the data's own gradient is g_i - alpha * (w_i - w_global)."""
        alpha = self.settings.alpha
        ways = map_tensors(lambda w, start: (w - start).mul_(alpha), params, client.global_params)
        return ClientOutput(state=map_tensors(lambda turned, way: turned.neg().sub_(way), client.prepared, ways))

    def init_server(self, problem: Problem, model: Tree) -> Tree:
        """The server's h = 0."""
        return map_tensors(torch.zeros_like, only(model, problem.trainable))

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        """Update h and shift the model by -h/alpha; buffers stay as they are."""
        alpha = self.settings.alpha
        if alpha == 0:
            return ServerOutput(model, state)
        scale = alpha * server.participants / server.problem.clients
        h = {name: state[name] - scale * (server.average[name] - server.global_model[name]) for name in state}
        return ServerOutput(model | {name: model[name] - h[name] / alpha for name in h}, h)

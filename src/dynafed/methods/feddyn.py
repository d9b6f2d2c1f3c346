"""FedDyn: a client's loss is bent so that its optimum agrees with the global one.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dynafed.methods.base import Finished, Local, Method, Needs, Refined, Server
from dynafed.settings import setting
from dynafed.tree import Tree, map_tensors, only

if TYPE_CHECKING:
    from dynafed.engine.plan import Plan


@dataclass(frozen=True)
class FedDynSettings:
    """Section `feddyn`."""

    alpha: float = setting(0.01, "strength of the regularisation; the paper takes 0.1, 0.01 or 0.001", low=0)


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
    strengths = ("alpha",)

    def refuses(self, others: Sequence[Method]) -> str | None:
        """The server's h is a uniform mean over clients, and so must be the average that it is read off."""
        return None if self.config.weighting == "uniform" else "feddyn's clients count alike: weighting = 'uniform'"

    def begin(self, local: Local) -> Tree:
        """The client's last gradient g_i, zero at first."""
        return local.memory or map_tensors(torch.zeros_like, local.start)

    def adjust(self, grads: Tree, params: Tree, local: Local) -> Tree:
        """Add the gradient of both terms."""
        alpha = self.settings.alpha
        return map_tensors(
            lambda grad, w, start, last: grad + alpha * (w - start) - last, grads, params, local.start, local.carry
        )

    def finish(self, params: Tree, local: Local) -> Finished:
        """At the optimum of the bent loss, the data's own gradient is g_i - alpha * (w_i - w_global)."""
        alpha = self.settings.alpha
        return Finished(
            memory=map_tensors(lambda last, w, start: last - alpha * (w - start), local.carry, params, local.start)
        )

    def initial(self, plan: Plan, model: Tree) -> Tree:
        """The server's h = 0."""
        return map_tensors(torch.zeros_like, only(model, plan.trainable))

    def refine(self, model: Tree, state: Tree, server: Server) -> Refined:
        """Update h and shift the model by -h/alpha; buffers stay as they are."""
        alpha = self.settings.alpha
        if alpha == 0:
            return Refined(model, state)
        scale = alpha * server.participants / len(server.plan.partition)
        h = {name: state[name] - scale * (server.combined[name] - server.before[name]) for name in state}
        return Refined(model | {name: model[name] - h[name] / alpha for name in h}, h)

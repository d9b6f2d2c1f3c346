"""FedNova: clients that take more steps don't count more; each update is divided by its steps before averaging.

Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020.
"""

from __future__ import annotations

import torch

from dynafed.messages import Update
from dynafed.methods.base import Combined, Combiner, Method, ServerContext
from dynafed.methods.fedavg import Mean
from dynafed.tree import Tree


class FedNova(Method):
    """w = w_global - tau_eff * sum_i p_i * (w_global - w_i) / a_i, with tau_eff = sum_i p_i * a_i.

    p_i is the client's share (`weighting`). a_i sums the weights with which its local gradients enter w_i: the number
    of steps for SGD, more with momentum. Adam's steps have no such weights; they are counted as SGD's are.
    """

    name = "fednova"
    summary = "averages each client's update per local step, then scales it by the mean number of steps"
    citation = "Wang et al., NeurIPS 2020"
    ignores_weighting = False
    counts_steps = True

    def combiner(self, server: ServerContext) -> Combiner:
        """The normalized average."""
        momentum = self.config.momentum if self.config.optimizer == "momentum" else 0.0
        return NormalizedMean(server.global_model, server.problem.trainable, self.config.weighting, momentum)


class NormalizedMean:
    """Two running sums: of the clients' normalized updates, and of their a_i. Buffers are averaged as they are."""

    def __init__(self, start: Tree, trainable: tuple[str, ...], weighting: str, momentum: float) -> None:
        self.start, self.trainable, self.momentum = start, trainable, momentum
        self.mean = Mean(weighting)
        self.effective_steps = 0.0

    def add(self, update: Update) -> None:
        """Add one client's update, divided by a_i."""
        scale = accumulated_weight(update.steps, self.momentum)
        deltas = {name: (update.model[name].double() - self.start[name].double()) / scale for name in self.trainable}
        weight = self.mean.weight(update)
        self.mean.add_tree({**update.model, **deltas}, weight)
        self.effective_steps += weight * scale

    def result(self) -> Combined:
        """The global model moved by the mean update times tau_eff, which goes to the metrics."""
        mean, effective = self.mean.mean(), self.effective_steps / self.mean.total
        moved = {
            name: (self.start[name].double() + effective * mean[name]).to(self.start[name].dtype)
            for name in self.trainable
        }
        return Combined({**mean, **moved}, {"effective_steps": effective})


def accumulated_weight(steps: int, momentum: float) -> float:
    """a_i: with momentum m, gradient k of n enters with weight (1 - m^(n-k+1)) / (1 - m); without, with weight 1."""
    if momentum == 0:
        return float(steps)
    if momentum == 1:
        return steps * (steps + 1) / 2
    powers = torch.arange(1, steps + 1, dtype=torch.float64)
    return float(((1 - momentum**powers) / (1 - momentum)).sum())

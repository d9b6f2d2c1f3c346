"""ABAVG: clients count in the average by how accurate their models are on the server's data.

Xiao et al., A Novel Server-Side Aggregation Strategy for Federated Learning in Non-IID Situations, ISPDC 2021.
"""

from __future__ import annotations

from dynafed.messages import Update
from dynafed.methods.base import Combined, Combiner, Method, Needs, ServerContext
from dynafed.methods.fedavg import Mean
from dynafed.tree import Tree

NONE_RIGHT = 1e-9
"""Stands for an accuracy of zero, so that clients who are all wrong still have an average."""


class AbAvg(Method):
    """The mean weighted by accuracy over all of the server's labeled samples; one model is held at a time."""

    name = "abavg"
    summary = "the average weighted by each client model's accuracy on server data"
    citation = "Xiao et al., ISPDC 2021"
    needs = Needs(server_data="labeled", client_models=True, classes=True)

    def combiner(self, server: ServerContext) -> Combiner:
        """The weighted mean."""
        return ByAccuracy(server)


class ByAccuracy:
    """A mean whose weights are accuracies."""

    def __init__(self, server: ServerContext) -> None:
        self.problem = server.problem
        self.x, self.y = server.samples
        self.mean = Mean("uniform")

    def accuracy(self, model: Tree) -> float:
        """The share of the server's samples that a model gets right."""
        return int((self.problem.predict(model, self.x).argmax(1) == self.y).sum()) / len(self.y)

    def add(self, update: Update) -> None:
        """Weigh one model and add it."""
        self.mean.add_tree(update.model, max(self.accuracy(update.model), NONE_RIGHT))

    def result(self) -> Combined:
        """The weighted mean."""
        return self.mean.result()

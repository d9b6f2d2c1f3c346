"""ABAVG: clients count in the average by how accurate their models are on the server's data.

Xiao et al., A Novel Server-Side Aggregation Strategy for Federated Learning in Non-IID Situations, ISPDC 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynafed.messages import Update
from dynafed.methods.base import Combiner, Method, Needs
from dynafed.methods.fedavg import Mean
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.engine.plan import Plan

NONE_RIGHT = 1e-9
"""Stands for an accuracy of zero, so that clients who are all wrong still have an average."""


class AbAvg(Method):
    """The mean weighted by accuracy over all of the server's labelled samples; one model is held at a time."""

    name = "abavg"
    summary = "the average weighted by each client model's accuracy on server data"
    citation = "Xiao et al., ISPDC 2021"
    needs = Needs(server_data="labelled", client_models=True)

    def combiner(self, plan: Plan) -> Combiner:
        """The weighted mean."""
        return ByAccuracy(plan)


class ByAccuracy:
    """A mean whose weights are accuracies."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.x, self.y = plan.server_data()
        self.mean = Mean("uniform")

    def accuracy(self, model: Tree) -> float:
        """The share of the server's samples that a model gets right."""
        return int((self.plan.predict(model, self.x).argmax(1) == self.y).sum()) / len(self.y)

    def add(self, update: Update) -> None:
        """Weigh one model and add it."""
        self.mean.add_tree(update.model, max(self.accuracy(update.model), NONE_RIGHT))

    def result(self) -> Tree:
        """The weighted mean."""
        return self.mean.result()

"""FedAvg: clients train on their own data, the server averages their models.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
"""

from __future__ import annotations

import torch

from dynafed.messages import Update
from dynafed.methods.base import Combined, Method
from dynafed.tree import Tree, cast


class FedAvg(Method):
    """The defaults of `Method`, under a name."""

    name = "fedavg"
    summary = "plain local training, then the average of the clients' models"
    citation = "McMahan et al., AISTATS 2017"


class Mean:
    """The weighted mean of a stream of models; holds one running sum, however many clients there are."""

    def __init__(self, weighting: str) -> None:
        self.weighting = weighting
        self.total = 0.0
        self.sums: Tree = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def add(self, update: Update) -> None:
        """Add one model. The sums are double precision, so that the order of clients hardly matters."""
        self.add_tree(update.model, self.weight(update))

    def weight(self, update: Update) -> float:
        """How much an update counts."""
        return float(update.examples) if self.weighting == "examples" else 1.0

    def add_tree(self, tree: Tree, weight: float = 1.0) -> None:
        """Add any tree."""
        self.total += weight
        for name, tensor in tree.items():
            if name not in self.sums:
                self.dtypes[name] = tensor.dtype
                self.sums[name] = torch.zeros(tensor.shape, dtype=torch.float64)
            self.sums[name].add_(tensor, alpha=weight)

    def result(self) -> Combined:
        """The mean of the models."""
        return Combined(self.mean())

    def mean(self) -> Tree:
        """The mean, in the trees' own dtypes; whole-number buffers are rounded."""
        return {name: cast(total / self.total, self.dtypes[name]) for name, total in self.sums.items()}

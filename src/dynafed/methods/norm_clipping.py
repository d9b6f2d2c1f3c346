"""Norm clipping: no client's change of the model counts for more than that of the others.

Sun et al., Can You Really Backdoor Federated Learning?, 2019.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from dynafed import tree
from dynafed.methods.base import Combiner, ServerContext
from dynafed.methods.robust import Gathered, Robust, weighted
from dynafed.settings import setting
from dynafed.tree import Tree


@dataclass(frozen=True)
class NormClippingSettings:
    """Section `norm-clipping`."""

    bound: float = setting(0.0, "largest norm of a client's change (0: the median of the round's norms)", low=0)


class NormClipping(Robust):
    """The mean of changes that are scaled down to a common norm."""

    name = "norm-clipping"
    summary = "the mean of the clients' changes, each cut to the median norm, in the average's place"
    citation = "Sun et al., 2019"
    Settings = NormClippingSettings
    settings: NormClippingSettings

    def combiner(self, server: ServerContext) -> Combiner:
        """Clip the change of the global model; what is sent beside the model is a change by itself."""
        return Gathered(
            lambda models: self._clipped(models, server.global_model, self.settings.bound),
            lambda extras: self._clipped(extras, tree.map_tensors(torch.zeros_like, extras[0]), 0.0),
        )

    def _clipped(self, models: list[Tree], start: Tree, bound: float) -> Tree:
        changes = [tree.difference(model, start) for model in models]
        norms = [tree.norm(change) for change in changes]
        bound = bound or statistics.median(norms)
        shares = [min(1.0, bound / norm) if norm else 1.0 for norm in norms]
        return weighted([tree.moved(start, m, s) for m, s in zip(models, shares, strict=True)], [1.0] * len(models))

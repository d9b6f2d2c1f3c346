"""The geometric median: the point with the smallest sum of distances to the clients' models.

Pillutla et al., Robust Aggregation for Federated Learning, IEEE Transactions on Signal Processing 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynafed.methods.base import Combiner, ServerContext
from dynafed.methods.robust import Gathered, Robust, flat, weighted
from dynafed.settings import setting
from dynafed.tree import Tree


@dataclass(frozen=True)
class GeometricMedianSettings:
    """Section `geometric-median`."""

    iterations: int = setting(10, "steps of Weiszfeld's algorithm", low=1)
    smoothing: float = setting(1e-6, "smallest distance, as a share of the mean one", above=0)


class GeometricMedian(Robust):
    """Weiszfeld's algorithm over the trainable parameters; buffers get the weights that it ends with."""

    name = "geometric-median"
    summary = "the point nearest to all models, by the sum of distances, in the average's place"
    citation = "Pillutla et al., IEEE TSP 2022"
    Settings = GeometricMedianSettings
    settings: GeometricMedianSettings

    def combiner(self, server: ServerContext) -> Combiner:
        """Weights that fall with the distance."""
        return Gathered(
            lambda models: self._median(models, server.problem.trainable),
            lambda extras: self._median(extras, list(extras[0])),
        )

    def _median(self, models: list[Tree], names: Sequence[str]) -> Tree:
        points = flat(models, names)
        weights = [1.0] * len(models)
        for _ in range(self.settings.iterations):
            center = sum(w * point for w, point in zip(weights, points, strict=True)) / sum(weights)
            distances = [float((point - center).norm()) for point in points]
            least = self.settings.smoothing * sum(distances) / len(distances)
            weights = [1 / max(distance, least) if least else 1.0 for distance in distances]
        return weighted(models, weights)

"""Krum: of the clients' models, the one in the thick of the others.

Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dynafed.methods.base import Combiner, ServerContext
from dynafed.methods.fedavg import Mean
from dynafed.methods.robust import Gathered, Robust, flat, part
from dynafed.settings import setting
from dynafed.tree import Tree


@dataclass(frozen=True)
class KrumSettings:
    """Section `krum`."""

    share: float = setting(0.1, "of the clients assumed to be wrong, rounded up", low=0, high=0.5)
    keep: int = setting(1, "models with the best scores that are averaged; more than one is Multi-Krum", low=1)


class Krum(Robust):
    """The model that is nearest to its nearest neighbors.

    With n models of which f are assumed wrong, a model's score is the sum of its squared distances to the n - f - 2
    others nearest to it. Krum needs n > 2f + 2; with fewer models, f is what n allows.
    """

    name = "krum"
    summary = "the one model (or the few) closest to the others in the average's place"
    citation = "Blanchard et al., NeurIPS 2017"
    Settings: ClassVar[type[Any] | None] = KrumSettings

    def combiner(self, server: ServerContext) -> Combiner:
        """Choose by distance over the trainable parameters; buffers come along."""
        return Gathered(
            lambda models: self._chosen(models, server.problem.trainable),
            lambda extras: self._chosen(extras, list(extras[0])),
        )

    def _chosen(self, models: list[Tree], names: Sequence[str]) -> Tree:
        wrong = part(self.settings.share, len(models), spare=3)
        scores = krum_scores(flat(models, names), wrong)
        mean = Mean("uniform")
        for index in sorted(range(len(models)), key=scores.__getitem__)[: self.keep(len(models), wrong)]:
            mean.add_tree(models[index])
        return mean.mean()

    def keep(self, models: int, wrong: int) -> int:
        """How many models are averaged."""
        return int(self.settings.keep)


@dataclass(frozen=True)
class MultiKrumSettings:
    """Section `multi-krum`."""

    share: float = setting(0.1, "of the clients assumed to be wrong, rounded up", low=0, high=0.5)


class MultiKrum(Krum):
    """The mean of all models but those with the worst scores, as many as are assumed wrong."""

    name = "multi-krum"
    summary = "the mean of all models but the few farthest from the others"
    citation = "Blanchard et al., NeurIPS 2017"
    Settings = MultiKrumSettings

    def keep(self, models: int, wrong: int) -> int:
        """All but those assumed wrong."""
        return models - wrong


def krum_scores(points: Tensor, wrong: int) -> list[float]:
    """Each row's sum of squared distances to the n - wrong - 2 other rows nearest to it (at least one)."""
    near = max(1, len(points) - wrong - 2)
    squares = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    # A point's distance to itself, zero, sorts first.
    scores: list[float] = squares.sort(1).values[:, 1 : near + 1].sum(1).tolist()
    return scores

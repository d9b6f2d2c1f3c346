"""Averages that a few wrong clients can't move far; each takes the mean's place.

Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynafed.messages import Update
from dynafed.methods.base import Combined, Combiner, Method, Needs, ServerContext
from dynafed.settings import setting
from dynafed.tree import Tree, cast, map_tensors

Combine = Callable[[list[Tree]], Tree]


class Gathered:
    """Keeps every model until the last one is there, then combines them all.

    What the clients' methods send beside the model is combined in the same way, by itself: a client can send a sound
    model and something wrong beside it.
    """

    def __init__(self, combine: Combine, combine_extras: Combine | None = None) -> None:
        self.combine = combine
        self.combine_extras = combine_extras or combine
        self.models: list[Tree] = []
        self.extras: dict[str, list[Tree]] = {}

    def add(self, update: Update) -> None:
        """Take one more update."""
        self.models.append(update.model)
        for name, extra in update.extras.items():
            self.extras.setdefault(name, []).append(dict(extra))

    def result(self) -> Combined:
        """The combined model."""
        extras = {name: self.combine_extras(trees) for name, trees in self.extras.items()}
        return Combined(self.combine(self.models), extras=extras)


class Robust(Method):
    """A robust average. Clients count alike, however many samples they say they have."""

    needs = Needs(client_models=True)

    def incompatibility(self, others: Sequence[Method]) -> str | None:
        """A step that learns from each client's model would let in what the robust average keeps out."""
        trusting = [other.name for other in others if other.needs.client_models]
        if trusting:
            return (
                f"{self.name} distrusts single clients, but {trusting[0]} learns from every client's model; "
                "take one of them"
            )
        unguarded = [other.name for other in others if other.overrides("setup_client")]
        if unguarded:
            return (
                f"{self.name} distrusts single clients, but {unguarded[0]} gives what each sent before round 1 to all; "
                "take one of them"
            )
        return None


class Median(Robust):
    """Each coordinate's median; of an even number of values, the mean of the middle two."""

    name = "median"
    summary = "the coordinate-wise median in the average's place"
    citation = "Yin et al., ICML 2018"

    def combiner(self, server: ServerContext) -> Combiner:
        """A trimmed mean that leaves one value, or two."""
        return Gathered(lambda models: trimmed(models, (len(models) - 1) // 2))


@dataclass(frozen=True)
class TrimmedSettings:
    """Section `trimmed-mean`."""

    share: float = setting(0.1, "of the values left out at either end, rounded up", low=0, high=0.5)


class TrimmedMean(Robust):
    """Each coordinate's mean without its smallest and largest values."""

    name = "trimmed-mean"
    summary = "the coordinate-wise mean without the extremes in the average's place"
    citation = "Yin et al., ICML 2018"
    Settings = TrimmedSettings
    settings: TrimmedSettings

    def combiner(self, server: ServerContext) -> Combiner:
        """Leave out a share at either end, but never all."""
        return Gathered(lambda models: trimmed(models, part(self.settings.share, len(models), spare=1)))


def part(share: float, models: int, spare: int) -> int:
    """A share of the models, rounded up, of which twice as many can be missed while `spare` are left."""
    return min(math.ceil(share * models - 1e-9), max(0, (models - spare) // 2))


def trimmed(models: list[Tree], cut: int) -> Tree:
    """The mean of each coordinate's values without the `cut` smallest and the `cut` largest."""

    def combine(*values: Tensor) -> Tensor:
        middle = torch.stack(values).sort(0).values[cut : len(values) - cut].to(torch.float64).mean(0)
        return cast(middle, values[0].dtype)

    return map_tensors(combine, *models)


def flat(models: Sequence[Tree], names: Sequence[str]) -> Tensor:
    """The named tensors of each model as a row, in double precision."""
    return torch.stack([torch.cat([model[name].flatten() for name in names]) for model in models]).to(torch.float64)


def weighted(models: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """The mean with these weights."""
    total = math.fsum(weights)

    def combine(*values: Tensor) -> Tensor:
        summed = torch.zeros(values[0].shape, dtype=torch.float64)
        for value, weight in zip(values, weights, strict=True):
            summed.add_(value, alpha=weight)
        return cast(summed / total, values[0].dtype)

    return map_tensors(combine, *models)

"""Rates, intervals and permutation tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

RESAMPLES = 500
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def plain(self) -> list[float]:
        """For JSON: value, low, high."""
        return [self.value, self.low, self.high]


def auc(positive: Array, negative: Array) -> float:
    """The chance that a positive score is above a negative one; ties count half."""
    order = np.sort(negative)
    below = np.searchsorted(order, positive, "left")
    at_most = np.searchsorted(order, positive, "right")
    return float((below + at_most).mean() / 2 / len(negative))


def true_positive_rate(positive: Array, negative: Array, false_positives: float = 0.01) -> float:
    """The share of positives above the score that so many negatives pass."""
    allowed = int(false_positives * len(negative))
    threshold = np.sort(negative)[::-1][allowed]
    return float((positive > threshold).mean())


def with_interval(
    statistic: Callable[[Array, Array], float], one: Array, other: Array, rng: np.random.Generator
) -> Estimate:
    """A statistic of two samples, with the interval of a bootstrap over both."""
    drawn = [
        statistic(one[rng.integers(len(one), size=len(one))], other[rng.integers(len(other), size=len(other))])
        for _ in range(RESAMPLES)
    ]
    return _estimate(statistic(one, other), drawn)


def mean_with_interval(values: Array, rng: np.random.Generator) -> Estimate:
    """The mean, with the interval of a bootstrap."""
    drawn = [float(values[rng.integers(len(values), size=len(values))].mean()) for _ in range(RESAMPLES)]
    return _estimate(float(values.mean()), drawn)


def _estimate(value: float, drawn: list[float]) -> Estimate:
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high))


def p_value(observed: float, permuted: list[float]) -> float:
    """How often chance gives at least what was observed; never zero."""
    return (1 + sum(value >= observed for value in permuted)) / (1 + len(permuted))

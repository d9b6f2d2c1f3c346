"""FedAvgM: the server keeps some of its last step.

Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dynafed.methods.fedopt import ServerOptimizer
from dynafed.settings import setting


@dataclass(frozen=True)
class MomentumSettings:
    """Section `fedavgm`."""

    lr: float = setting(1.0, "of the server", above=0)
    momentum: float = setting(0.9, "how much of the last step goes on", low=0, high=1)


class FedAvgM(ServerOptimizer):
    """v = momentum * v + delta; w = w_old + lr * v."""

    name = "fedavgm"
    summary = "server momentum"
    citation = "Hsu, Qi and Brown, arXiv:1909.06335, 2019"
    Settings = MomentumSettings
    settings: MomentumSettings

    def moments(self) -> dict[str, float]:
        """The velocity."""
        return {"v": 0.0}

    def step(self, delta: Tensor, moments: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Along the velocity."""
        velocity = self.settings.momentum * moments["v"] + delta
        return velocity, {"v": velocity}

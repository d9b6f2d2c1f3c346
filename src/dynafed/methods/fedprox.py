"""FedProx: a client is held back from drifting away from the global model.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020. Its other half, that a slow client's partial
work counts, is every method's here (`stragglers`).
"""

from __future__ import annotations

from dataclasses import dataclass

from dynafed.methods.base import AffineCorrection, ClientContext, Method
from dynafed.settings import setting


@dataclass(frozen=True)
class FedProxSettings:
    """Section `fedprox`."""

    mu: float = setting(0.01, "strength of the pull; the paper tries 0.001, 0.01, 0.1 and 1", low=0)


class FedProx(Method):
    """Adds mu/2 * ||w - w_global||^2 to the local loss.

    Only its gradient, mu * (w - w_global), is ever computed, so the training loss in the metrics stays the data's.
    With mu = 0 local training is FedAvg's, bit for bit.
    """

    name = "fedprox"
    summary = "pulls each client's model towards the global one"
    citation = "Li et al., MLSys 2020"
    Settings = FedProxSettings
    settings: FedProxSettings
    zero_means_fedavg = ("mu",)

    def affine_correction(self, client: ClientContext) -> AffineCorrection:
        """The gradient of the proximal term."""
        return AffineCorrection(self.settings.mu, client.global_params)

"""MOON: a client's features should be like the global model's and unlike those of its own last model.

Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dynafed.kernels import FusedLoss, contrast_loss
from dynafed.methods.base import ClientContext, ClientOutput, Method, Needs
from dynafed.settings import setting
from dynafed.tree import Tree


@dataclass(frozen=True)
class MoonSettings:
    """Section `moon`."""

    mu: float = setting(
        5.0, "weight of the contrastive loss; the paper takes 5 for CIFAR-10 and 1 for CIFAR-100", low=0
    )
    temperature: float = setting(0.5, "of the contrastive loss", above=0)


class Moon(Method):
    """Adds -mu * log(e^(s/T) / (e^(s/T) + e^(p/T))): s and p are the cosines between the features of the local model
    and those of the global and of the client's previous model.

    A client that has no previous model yet trains as in FedAvg: with the global model in its place, s = p and the term
    has no gradient. The features are what the network's head sees; the paper's projection head is not added.
    """

    name = "moon"
    summary = "contrasts each client's features with the global model's and its own last model's"
    citation = "Li, He and Song, CVPR 2021"
    needs = Needs(client_memory=True, features=True)
    Settings = MoonSettings
    settings: MoonSettings
    zero_means_fedavg = ("mu",)

    def loss(self, params: Tree, x: Tensor, y: Tensor, client: ClientContext) -> Tensor:
        """The loss and the contrastive term."""
        if not client.state:
            return super().loss(params, x, y, client)
        features = client.features(params, x)
        with torch.no_grad():
            wanted = client.features(client.global_params | client.global_buffers, x)
            unwanted = client.features(client.state | client.global_buffers, x)
        gap = F.cosine_similarity(features, unwanted) - F.cosine_similarity(features, wanted)
        contrast = F.softplus(gap / self.settings.temperature).mean()
        return client.task.mean_loss(client.head(params, features), y) + self.settings.mu * contrast

    def fused_loss(self, client: ClientContext) -> FusedLoss | None:
        """The same, with the other models' features of all samples: they don't change from step to step."""
        if not client.state:
            return None
        return contrast_loss(client.global_params, client.state, self.settings.mu, self.settings.temperature)

    def finish(self, params: Tree, client: ClientContext) -> ClientOutput:
        """Remember the model for the next time."""
        return ClientOutput(state=params if self.settings.mu else {})

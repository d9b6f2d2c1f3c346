"""FedMix: mixup with other clients' data, of which only averages are ever sent.

Yoon et al., FedMix: Approximation of Mixup under Mean Augmented Federated Learning, ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dynafed.errors import UserError
from dynafed.kernels import FusedLoss, mixture_loss
from dynafed.methods.base import ClientContext, ClientView, Method, Needs, ServerContext, ServerOutput
from dynafed.problem import Problem
from dynafed.settings import setting
from dynafed.tree import Tree


@dataclass(frozen=True)
class FedMixSettings:
    """Section `fedmix`."""

    ratio: float = setting(0.05, "lambda, the share of the others' averages in the mixture", low=0, high=1)
    samples: int = setting(5, "samples in an average; a client that has fewer sends none", low=2)
    sent: int = setting(100, "averages drawn from the pool for each round's broadcast (0: the whole pool)", low=0)
    mix: str = setting("taylor", "FedMix's Taylor approximation, or NaiveMix: plain mixup", choices=("taylor", "naive"))


class FedMix(Method):
    """With x' and y', an average of some client's samples and labels, and shrunk inputs s = (1 - lambda) * x:

        (1 - lambda) * loss(s, y) + lambda * loss(s, y') + lambda * d loss(s, y)/ds . x'

    Every batch draws one average, as in the paper. There, every client holds the whole pool; here a round's clients get
    a fresh draw of as many averages as they can use, which costs a hundredth of the bytes.
    """

    name = "fedmix"
    summary = "mixes each batch with averages of other clients' samples, sent once before round 1"
    citation = "Yoon et al., ICLR 2021"
    needs = Needs(classes=True, sample_gradients=True)
    Settings = FedMixSettings
    settings: FedMixSettings
    zero_means_fedavg = ("ratio",)

    def setup_client(self, client: ClientView) -> Tree:
        """The client's averages: every group has `samples` samples or a few more, never fewer."""
        problem, x, y = client.problem, client.x, client.y
        targets = F.one_hot(y, problem.classes).to(x.dtype)
        averages = len(y) // self.settings.samples
        if not averages:
            return self.setup_spec(problem)
        order = torch.from_numpy(problem.seeds.rng("fedmix", client.client).permutation(len(y))).to(problem.device)
        groups = torch.tensor_split(order, averages)
        return {
            name: torch.stack([values[group].mean(0) for group in groups]).cpu()
            for name, values in (("x", x), ("y", targets))
        }

    def setup_spec(self, problem: Problem) -> Tree:
        """Averages of samples and of their labels, one a row."""
        return {"x": torch.zeros(0, *problem.shape), "y": torch.zeros(0, problem.classes)}

    def setup_server(self, state: Tree, setups: Iterable[Tree], problem: Problem) -> Tree:
        """Pool all averages, and draw some of them for round 1."""
        sent = list(setups)
        if not any(len(each["y"]) for each in sent):
            raise UserError(f"no client has the fedmix.samples = {self.settings.samples} samples that make an average")
        pool = {name: torch.cat([each[name] for each in sent]) for name in ("x", "y")}
        return pool | {"rows": self._drawn(len(pool["y"]), problem, 1)}

    def broadcast(self, state: Tree) -> Tree:
        """The averages that were drawn for this round."""
        return {name: state[name][state["rows"]] for name in ("x", "y")}

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        """Draw for the next round; the model stays as it is."""
        return ServerOutput(model, state | {"rows": self._drawn(len(state["y"]), server.problem, server.round + 1)})

    def _drawn(self, size: int, problem: Problem, round_num: int) -> Tensor:
        count = min(self.settings.sent or size, size)
        return torch.from_numpy(
            problem.seeds.rng("fedmix-sent", round_num).choice(size, count, replace=False, shuffle=False)
        )

    def sample_step(self, batch_size: int, client: ClientContext) -> Tree:
        """One average."""
        row = int(client.rng.integers(len(client.extras["y"])))
        return {name: values[row] for name, values in client.extras.items()}

    def loss(self, params: Tree, x: Tensor, y: Tensor, client: ClientContext) -> Tensor:
        """The mixed loss."""
        ratio = self.settings.ratio
        x_mean, y_mean = client.sampled["x"], client.sampled["y"]
        taylor = self.settings.mix == "taylor"
        mixed = (1 - ratio) * x if taylor else (1 - ratio) * x + ratio * x_mean
        logits = client.forward(params, mixed.requires_grad_(taylor))
        own = F.cross_entropy(logits, y)
        loss = (1 - ratio) * own + ratio * F.cross_entropy(logits, y_mean.expand_as(logits))
        if taylor:
            (slope,) = torch.autograd.grad(own, mixed, create_graph=True)
            loss = loss + ratio * (slope * x_mean).sum()
        return loss

    def fused_loss(self, client: ClientContext) -> FusedLoss:
        """The mixed loss."""
        inputs, classes = client.x[0].numel(), client.extras["y"].shape[1]
        return mixture_loss(self.settings.ratio, self.settings.mix == "taylor", inputs, classes)

"""fluke's FedAvg, FedProx, SCAFFOLD and MOON, with its own FastDataLoader.

Clients forget their optimizer between rounds, as on the other sides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from peers.protocol import MOON_MU, MOON_TEMPERATURE, PROX_MU, Turns
from peers.torch_side import OPTIMIZERS, Steps, judge, network, parameters, pretend_torchvision_ops, tensors

pretend_torchvision_ops()

from fluke import FlukeENV  # noqa: E402
from fluke.algorithms import CentralizedFL  # noqa: E402
from fluke.algorithms.fedprox import FedProxClient  # noqa: E402
from fluke.algorithms.moon import MOONClient  # noqa: E402
from fluke.algorithms.scaffold import SCAFFOLDClient, SCAFFOLDServer  # noqa: E402
from fluke.client import Client  # noqa: E402
from fluke.config import OptimizerConfigurator  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402
from fluke.server import Server  # noqa: E402
from fluke.utils import FederationObserver  # noqa: E402

FOREVER = 10**9


class Asked(FederationObserver):
    """Holds the run after every round until the next one is wanted."""

    def __init__(self, turns: Turns, steps: Steps) -> None:
        self.turns, self.steps = turns, steps

    def end_round(self, round: int) -> None:
        self.turns.finished(self.steps.take())


class Contrasting(MOONClient):
    """fluke's, with an optimizer started anew. Without `persistency`, it would forget its last model with it."""

    def fit(self, override_local_epochs: int = 0) -> float:
        self.optimizer = None
        loss: float = super().fit(override_local_epochs)
        return loss


class Split(nn.Module):
    """A network in the two parts that fluke's MOON asks for."""

    def __init__(self, whole: nn.Sequential) -> None:
        super().__init__()
        self.encoder, self.head = whole[:-1], whole[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(x))
        return logits


CLIENTS: dict[str, tuple[type[Client], dict[str, Any]]] = {
    "fedavg": (Client, {"persistency": False}),
    "fedprox": (FedProxClient, {"persistency": False, "mu": PROX_MU}),
    "scaffold": (SCAFFOLDClient, {"persistency": False}),
    "moon": (Contrasting, {"mu": MOON_MU, "tau": MOON_TEMPERATURE}),
}
"""A method's clients, and what they are given."""


def main() -> None:
    turns = Turns()
    workload = turns.task.workload
    torch.set_num_threads(turns.task.options["threads"])
    x, y = tensors(turns.task)
    env = FlukeENV()
    env.set_seed(0)
    env.set_device("cpu")
    env.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    optimizer = OptimizerConfigurator({"name": OPTIMIZERS[workload.optimizer], "lr": workload.lr})
    kind, given = CLIENTS[workload.method]
    clients = [
        kind(
            index=i,
            train_set=FastDataLoader(
                x[workload.rows(i)],
                y[workload.rows(i)],
                num_labels=workload.classes,
                batch_size=workload.batch,
                shuffle=True,
                skip_singleton=False,
            ),
            test_set=None,
            optimizer_cfg=optimizer,
            loss_fn=torch.nn.CrossEntropyLoss(),
            local_epochs=1,
            **given,
        )
        for i in range(workload.clients)
    ]
    model = network(workload)
    if workload.method == "moon":
        assert isinstance(model, nn.Sequential)
        model = Split(model)
    server = (SCAFFOLDServer if workload.method == "scaffold" else Server)(model, None, clients)
    algorithm = CentralizedFL(workload.clients, None, {}, clients=clients, server=server)
    algorithm.set_callbacks(Asked(turns, Steps()))
    judge(turns, lambda: server.model, x, y)
    turns.ready(parameters(server.model), "fluke-fl", "torch")
    turns.start()
    algorithm.run(FOREVER, workload.share)


if __name__ == "__main__":
    main()

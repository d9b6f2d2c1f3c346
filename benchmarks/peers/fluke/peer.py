"""fluke's FedAvg, with its own FastDataLoader; clients forget their optimizer between rounds, as on the other sides."""

from __future__ import annotations

import torch

from peers.protocol import Turns
from peers.torch_side import Steps, loss_of, network, parameters, pretend_torchvision_ops, tensors

pretend_torchvision_ops()

from fluke import FlukeENV  # noqa: E402
from fluke.algorithms import CentralizedFL  # noqa: E402
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


def main() -> None:
    turns = Turns()
    workload = turns.task.workload
    torch.set_num_threads(turns.task.options["threads"])
    x, y = tensors(turns.task)
    env = FlukeENV()
    env.set_seed(0)
    env.set_device("cpu")
    env.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    adam = OptimizerConfigurator({"name": "Adam", "lr": workload.lr})
    clients = [
        Client(
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
            optimizer_cfg=adam,
            loss_fn=torch.nn.CrossEntropyLoss(),
            local_epochs=1,
            persistency=False,
        )
        for i in range(workload.clients)
    ]
    server = Server(network(workload), None, clients)
    algorithm = CentralizedFL(workload.clients, None, {}, clients=clients, server=server)
    algorithm.set_callbacks(Asked(turns, Steps()))
    turns.loss = loss_of(lambda: server.model, x, y)
    turns.ready(parameters(server.model), "fluke-fl", "torch")
    turns.start()
    algorithm.run(FOREVER, workload.share)


if __name__ == "__main__":
    main()

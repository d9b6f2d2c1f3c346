"""FedLab's standalone simulation: one process trains the clients one after the other."""

from __future__ import annotations

import logging

import torch
from torch.utils.data import DataLoader, TensorDataset

from peers.protocol import Turns
from peers.torch_side import Steps, judge, network, parameters, pretend_torchvision_ops, tensors

pretend_torchvision_ops()

from fedlab.contrib.algorithm import FedAvgSerialClientTrainer, FedAvgServerHandler  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402

FOREVER = 10**9


class Clients:
    """Everybody's data, as FedLab asks for it."""

    def __init__(self, datasets: list[TensorDataset]) -> None:
        self.datasets = datasets

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
        return DataLoader(self.datasets[client], batch_size, shuffle=True)


class Trainer(FedAvgSerialClientTrainer):
    """FedLab's FedAvg client, with Adam started anew for each client instead of plain gradient descent."""

    def train(self, model_parameters: torch.Tensor, train_loader: DataLoader) -> list[torch.Tensor]:
        self.optimizer = torch.optim.Adam(self._model.parameters(), self.lr)
        return super().train(model_parameters, train_loader)


class Pipeline(StandalonePipeline):
    """Stops after every round until the next one is wanted."""

    def __init__(self, handler: FedAvgServerHandler, trainer: Trainer, turns: Turns, steps: Steps) -> None:
        super().__init__(handler, trainer)
        self.turns, self.steps = turns, steps

    def evaluate(self) -> None:
        self.turns.finished(self.steps.take())


def main() -> None:
    logging.disable(logging.INFO)
    turns = Turns()
    workload = turns.task.workload
    torch.set_num_threads(turns.task.options["threads"])
    x, y = tensors(turns.task)
    model = network(workload)
    handler = FedAvgServerHandler(model, FOREVER, workload.share)
    trainer = Trainer(model, workload.clients)
    rows = [workload.rows(i) for i in range(workload.clients)]
    trainer.setup_dataset(Clients([TensorDataset(x[part], y[part]) for part in rows]))
    trainer.setup_optim(1, workload.batch, workload.lr)
    judge(turns, lambda: handler.model, x, y)
    pipeline = Pipeline(handler, trainer, turns, Steps())
    turns.ready(parameters(model), "fedlab", "torch")
    turns.start()
    pipeline.main()


if __name__ == "__main__":
    main()

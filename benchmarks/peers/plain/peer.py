"""FedAvg in a page of PyTorch: `loader` as everybody writes it, `careful` after a look at a profile."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from peers.protocol import Turns
from peers.torch_side import Steps, judge, network, parameters, tensors


def main() -> None:
    turns = Turns()
    workload, options = turns.task.workload, turns.task.options
    torch.set_num_threads(options["threads"])
    x, y = tensors(turns.task)
    model = network(workload)
    steps, rng = Steps(), np.random.default_rng(0)

    def sampled() -> list[int]:
        return rng.choice(workload.clients, workload.per_round, replace=False).tolist()

    datasets = [TensorDataset(x[workload.rows(i)], y[workload.rows(i)]) for i in range(workload.clients)]

    def loader_round() -> int:
        states = []
        for client in sampled():
            local = copy.deepcopy(model)
            optimizer = torch.optim.Adam(local.parameters(), workload.lr)
            for xs, ys in DataLoader(datasets[client], workload.batch, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(local(xs), ys).backward()
                optimizer.step()
            states.append(local.state_dict())
        model.load_state_dict({name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]})
        return steps.take()

    local = copy.deepcopy(model)

    def batches(client: int) -> Iterator[tuple[Tensor, Tensor]]:
        xs, ys = datasets[client].tensors
        for index in torch.randperm(workload.samples).split(workload.batch):
            yield xs[index], ys[index]

    def careful_round() -> int:
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        weights = list(local.parameters())
        for client in sampled():
            with torch.no_grad():
                torch._foreach_copy_(weights, list(model.parameters()))
            optimizer = torch.optim.Adam(weights, workload.lr, fused=True)
            for xs, ys in batches(client):
                optimizer.zero_grad()
                F.cross_entropy(local(xs), ys).backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(sums, weights)
        with torch.no_grad():
            torch._foreach_div_(sums, workload.per_round)
            torch._foreach_copy_(list(model.parameters()), sums)
        return steps.take()

    judge(turns, lambda: model, x, y)
    turns.ready(parameters(model), "torch")
    turns.run({"loader": loader_round, "careful": careful_round}[options["loop"]])


if __name__ == "__main__":
    main()

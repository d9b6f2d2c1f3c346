"""Flower's simulation: FedAvg of its message API, with as many Ray actors as the variant says."""

from __future__ import annotations

import os

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

from functools import lru_cache
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.utils.data import DataLoader, TensorDataset

from peers.protocol import Task, Turns
from peers.torch_side import Steps, judge, network, parameters, tensors

FOREVER = 10**9


@lru_cache(maxsize=1)
def everything(data: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The data, read once in each actor."""
    from pathlib import Path

    return tensors(Task(None, Path(data), {}))  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def counter() -> Steps:
    """An actor's count of steps."""
    return Steps()


def client_app(task: Task) -> ClientApp:
    """A client as Flower's tutorial has it."""
    app = ClientApp()
    workload, threads, data = task.workload, task.options["threads"], str(task.data)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        from peers.flower.peer import counter, everything

        torch.set_num_threads(threads)
        x, y = everything(data)
        rows = workload.rows(int(context.node_config["partition-id"]))
        model = network(workload)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.Adam(model.parameters(), workload.lr)
        steps = counter()
        steps.take()
        for xs, ys in DataLoader(TensorDataset(x[rows], y[rows]), workload.batch, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(xs), ys).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": workload.samples, "steps": steps.take()})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


def server_app(turns: Turns) -> ServerApp:
    """FedAvg, held after every round until the next one is wanted."""
    app = ServerApp()
    workload = turns.task.workload
    counted = 0

    def add_up(contents: list[RecordDict], key: str) -> MetricRecord:
        nonlocal counted
        counted = sum(int(content["metrics"]["steps"]) for content in contents)
        return MetricRecord({"steps": counted})

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        model = network(workload)
        judge(turns, lambda: model, *everything(str(turns.task.data)))

        def after(round: int, arrays: ArrayRecord) -> Any:
            if round == 0:
                turns.ready(parameters(model), "flwr", "ray", "torch")
                turns.start()
            else:
                model.load_state_dict(arrays.to_torch_state_dict())
                turns.finished(counted)

        strategy = FedAvg(
            fraction_train=workload.share,
            fraction_evaluate=0.0,
            min_available_nodes=workload.clients,
            train_metrics_aggr_fn=add_up,
        )
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=FOREVER, evaluate_fn=after)

    return app


def main() -> None:
    turns = Turns()
    actors = turns.task.options["actors"]

    def close() -> None:
        import ray

        ray.shutdown()
        os._exit(0)

    turns.closing = close
    run_simulation(
        server_app=server_app(turns),
        client_app=client_app(turns.task),
        num_supernodes=turns.task.workload.clients,
        backend_config={
            "init_args": {"num_cpus": actors, "include_dashboard": False, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
        },
    )


if __name__ == "__main__":
    main()

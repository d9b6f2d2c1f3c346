"""The server: FedAvg, and three lines that put DynaFed around it."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from dynafed.flower import DynaFed
from quickstart.task import CLASSES, SHAPE, Net, test_data

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    config = context.run_config
    strategy: Strategy = FedAvg(fraction_train=float(config["fraction-train"]), fraction_evaluate=0.0)
    if config["dynafed"]:
        settings = {"trajectory": config["recorded-rounds"], "iterations": config["iterations"], "samples": 100}
        strategy = DynaFed(strategy, model=Net, shape=SHAPE, classes=CLASSES, config=settings)
    torch.manual_seed(0)
    result = strategy.start(
        grid, ArrayRecord(Net().state_dict()), num_rounds=int(config["num-server-rounds"]), evaluate_fn=evaluate
    )
    last = [metrics["accuracy"] for metrics in list(result.evaluate_metrics_serverapp.values())[-5:]]
    print(f"accuracy over the last {len(last)} rounds: {sum(last) / len(last):.3f}")


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """The global model's accuracy on the test images."""
    x, y = test_data()
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        return MetricRecord({"accuracy": float((net(x).argmax(dim=1) == y).float().mean())})

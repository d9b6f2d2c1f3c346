"""The clients: plain Flower and plain PyTorch."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from quickstart.task import Net, client_data

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch on the client's own data."""
    partition, partitions = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    x, y = client_data(partition, partitions)
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    torch.manual_seed(partition)
    for rows in torch.randperm(len(x)).split(32):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

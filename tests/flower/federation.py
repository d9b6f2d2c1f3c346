"""A federation of seven nodes that takes milliseconds, and what it did."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp.strategy import Result, Strategy
from grid import LocalGrid, answer
from problems import TRAIN
from torch import Tensor, nn
from torch.func import functional_call

from dynafed.flower import DynaFed

NODES = 7
ROUNDS = 8
SMALL: dict[str, Any] = {
    "trajectory": 4,
    "segment": 2,
    "samples": 12,
    "iterations": 10,
    "inner_steps": 3,
    "inner_lr": 0.1,
    "finetune_steps": 5,
    "finetune_lr": 1e-3,
}

Weights = dict[str, Tensor]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def initial() -> ArrayRecord:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return ArrayRecord(network().state_dict())


def wrapped(strategy: Strategy, **changes: Any) -> DynaFed:
    given = {"model": network, "shape": (6,), "classes": 4, "config": SMALL} | changes
    return DynaFed(strategy, **given)


def train(node: int, message: Message) -> RecordDict:
    """A user's client: three steps on the node's own samples, mostly of one class."""
    if message.metadata.message_type == MessageType.EVALUATE:
        return answer(ArrayRecord(), accuracy=0.5)
    module = network()
    weights = {name: tensor.float() for name, tensor in message.content["arrays"].to_torch_state_dict().items()}
    x, y = map(torch.from_numpy, TRAIN)
    rows = torch.from_numpy(np.flatnonzero(TRAIN[1] == node % 4)[node // 4 :: 2])
    for _ in range(3):
        leaves = {name: tensor.requires_grad_() for name, tensor in weights.items()}
        loss = nn.functional.cross_entropy(functional_call(module, leaves, (x[rows],)), y[rows])
        grads = torch.autograd.grad(loss, list(leaves.values()))
        weights = {name: (t - 0.1 * g).detach() for (name, t), g in zip(leaves.items(), grads, strict=True)}
    return answer(ArrayRecord(weights), train_loss=float(loss), norm_bit=1.0)


class Diary:
    """An evaluate function that keeps the global model of every round."""

    def __init__(self, crash_after: int = -1) -> None:
        self.models: dict[int, Weights] = {}
        self.crash_after = crash_after

    def __call__(self, server_round: int, arrays: ArrayRecord) -> None:
        self.models[server_round] = dict(arrays.to_torch_state_dict())
        if server_round == self.crash_after:
            raise RuntimeError("the server app is killed")


def run(
    strategy: Strategy, client: Any = train, rounds: int = ROUNDS, **more: Any
) -> tuple[Result, dict[int, Weights]]:
    """Run it, with every random draw of Flower's own seeded."""
    np.random.seed(0)
    diary = more.pop("diary", None) or Diary()
    arrays = more.pop("arrays", None) or initial()
    nodes = more.pop("nodes", NODES)
    gc.freeze()  # some strategies collect garbage with every reply, which takes long with torch in memory
    try:
        result = strategy.start(LocalGrid(nodes, client), arrays, rounds, evaluate_fn=diary, **more)
    finally:
        gc.unfreeze()
    return result, diary.models


def equal(one: Weights, other: Weights) -> bool:
    """The same bits, dtypes and order."""
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )

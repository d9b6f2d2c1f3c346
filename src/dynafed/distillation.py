"""Teaching one network what others say about the server's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from dynafed import optim, tree
from dynafed.record import slopes
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.engine.plan import Plan
    from dynafed.methods.base import Server

LOOK_EVERY = 20
"""Steps between two looks at how it gets on."""


def distil(
    name: str,
    model: Tree,
    targets: Tensor,
    server: Server,
    *,
    optimizer: str,
    batch_size: int,
    steps: int,
    rate: Callable[[int], float],
) -> Iterator[tuple[int, Tree]]:
    """Train a copy of `model` to give the class probabilities `targets` on the server's samples.

    After each step comes how many are done, and the student's weights as they are at that moment. `rate` is the
    learning rate at each step, the first being 0.
    """
    plan = server.plan
    x, _ = plan.server_data()
    student = tree.by_columns(tree.to(tree.clone(model), plan.device), plan.matrices)
    taught = optim.Optimizer(optimizer, [student[name] for name in plan.trainable], rate(0))
    gradients = slopes(plan.recorder, name, partial(_divergence, plan), student, plan.trainable)
    order = optim.batches((x, targets), batch_size, steps, plan.seeds.rng(name, server.round))
    with plan.seeds.torch_seeded(name, server.round):
        for step, (batch, wanted) in enumerate(order):
            plan.module.train()
            taught.lr = rate(step)
            taught.step(gradients(batch, wanted))
            if step % LOOK_EVERY == 0:
                server.host.check()
                server.host.busy("distillation", step, steps)
            yield step + 1, student


def _divergence(plan: Plan, weights: Tree, x: Tensor, targets: Tensor) -> Tensor:
    """From the targets to what the network says, the mean over a batch."""
    return F.kl_div(plan.forward(weights, x).log_softmax(1), targets, reduction="batchmean")

"""Teaching one network what others say about the server's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from dynafed import optim, tree
from dynafed.problem import Problem
from dynafed.tracing import gradient_function
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.methods.base import ServerContext

LOOK_EVERY = 20
"""Steps between two looks at how it gets on."""


def distill(
    name: str,
    model: Tree,
    targets: Tensor,
    server: ServerContext,
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
    problem = server.problem
    x, _ = server.samples
    student = problem.to_device(tree.clone_contiguous(model))
    taught = optim.Optimizer(optimizer, [student[name] for name in problem.trainable], rate(0))
    gradients = gradient_function(problem.tracer, name, partial(_divergence, problem), student, problem.trainable)
    order = optim.batches((x, targets), batch_size, steps, problem.seeds.rng(name, server.round))
    with problem.seeds.torch_seeded(name, server.round):
        for step, (batch, wanted) in enumerate(order):
            problem.network.train()
            taught.lr = rate(step)
            taught.step(gradients(batch, wanted))
            if step % LOOK_EVERY == 0:
                server.runtime.check_stop()
                server.runtime.progress("distillation", step, steps)
            yield step + 1, student


def _divergence(problem: Problem, weights: Tree, x: Tensor, targets: Tensor) -> Tensor:
    """From the targets to what the network says, the mean over a batch."""
    return F.kl_div(problem.forward(weights, x).log_softmax(1), targets, reduction="batchmean")

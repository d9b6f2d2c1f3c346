"""How good a model is on the evaluation split."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dynafed import tree
from dynafed.engine.plan import CHUNK, Plan
from dynafed.tree import Tree


def chunks(plan: Plan) -> list[tuple[int, int]]:
    """The slices of the evaluation split."""
    size = plan.evaluation_size()
    return [(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK)]


def accuracy(plan: Plan, model: Tree) -> float:
    """The share of the evaluation split that is classified rightly."""
    return sum(evaluate_chunk(plan, model, *ends)[0] for ends in chunks(plan)) / plan.evaluation_size()


@torch.no_grad()
def evaluate_chunk(plan: Plan, model: Tree, start: int, stop: int) -> tuple[int, float]:
    """How many of a slice's samples are classified rightly, and the sum of their losses."""
    plan.module.eval()
    x, y = plan.evaluation_data(start, stop)
    logits = plan.forward(tree.to(model, plan.device), x)
    return int((logits.argmax(1) == y).sum()), float(F.cross_entropy(logits, y, reduction="sum"))

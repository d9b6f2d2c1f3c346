"""FedDF: the server teaches the averaged model what the clients' models say together about unlabeled data.

Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dynafed import tree
from dynafed.distillation import LOOK_EVERY, distill
from dynafed.methods.base import Method, Needs, ServerContext, ServerOutput
from dynafed.settings import setting
from dynafed.tree import Tree


@dataclass(frozen=True)
class FedDFSettings:
    """Section `feddf`."""

    steps: int = setting(10_000, "distillation steps in a round, at most", low=0)
    patience: int = setting(1000, "stop after so many steps in which the student didn't get better", low=1)
    lr: float = setting(1e-3, "of Adam at the first step; it falls as a cosine", above=0)
    batch_size: int = setting(128, "server samples in a step", low=1)
    validate: bool = setting(
        False, "keep the student that is best by the labels of the server's samples, perhaps the average itself"
    )


class FedDF(Method):
    """Minimizes KL(softmax of the clients' mean logits, student), starting at the average.

    The paper stops when accuracy on a validation set stops rising. Without labels, the share of the server's samples on
    which student and ensemble choose the same class takes its place. That is no safeguard: clients that know a class
    or two make an ensemble that is worse than the average of their weights. `validate` is one.
    """

    name = "feddf"
    summary = "distills the ensemble of the clients' models into the average, on unlabeled server data"
    citation = "Lin et al., NeurIPS 2020"
    needs = Needs(server_data="unlabeled", client_models=True, classes=True)
    Settings = FedDFSettings
    settings: FedDFSettings

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        """Distill."""
        chosen, problem = self.settings, server.problem
        if not chosen.steps:
            return ServerOutput(model, state)
        x, y = server.samples
        logits = torch.stack([problem.predict(update.model, x) for update in server.updates]).mean(0)
        wanted = y if chosen.validate else logits.argmax(1)

        def score(weights: Tree) -> int:
            return int((problem.predict(weights, x).argmax(1) == wanted).sum())

        best, best_step, kept = score(model) if chosen.validate else -1, 0, model
        done, student = 0, model
        steps = distill(
            self.name,
            model,
            logits.softmax(1),
            server,
            optimizer="adam",
            batch_size=chosen.batch_size,
            steps=chosen.steps,
            rate=lambda step: chosen.lr * (1 + math.cos(math.pi * step / chosen.steps)) / 2,
        )
        for done, student in steps:
            if done % LOOK_EVERY == 0 or done == chosen.steps:
                if (right := score(student)) > best:
                    best, best_step, kept = right, done, tree.clone_contiguous(student)
                elif done - best_step >= chosen.patience:
                    break
        result, taken = (kept, best_step) if chosen.validate else (student, done)
        return ServerOutput(tree.to(tree.clone_contiguous(result), "cpu"), state, {"distillation_steps": taken})

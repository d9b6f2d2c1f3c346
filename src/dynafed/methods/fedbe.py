"""FedBE: FedDF with more teachers, sampled from a distribution over models, and a student that is itself an average.

Chen and Chao, FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning, ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dynafed import tree
from dynafed.distillation import distill
from dynafed.methods.base import Method, Needs, ServerContext, ServerOutput
from dynafed.methods.fedavg import Mean
from dynafed.settings import setting
from dynafed.tree import Tree


@dataclass(frozen=True)
class FedBESettings:
    """Section `fedbe`."""

    samples: int = setting(10, "models sampled in a round", low=0)
    distribution: str = setting(
        "gaussian", "of the sampled models, fitted to the clients'", choices=("gaussian", "dirichlet")
    )
    concentration: float = setting(1.0, "of the Dirichlet distribution of the clients' weights", above=0)
    epochs: int = setting(20, "passes over the server's data in a round", low=0)
    batch_size: int = setting(128, "server samples in a step", low=1)
    lr: float = setting(1e-3, "of SGD with momentum 0.9, at the start of each cycle", above=0)
    lr_end: float = setting(4e-4, "at the end of each cycle", above=0)
    cycle: int = setting(25, "steps in a cycle, after each of which the student joins the average", low=1)
    swa_start: int = setting(
        250, "steps before the first student joins, or half of all steps if those are fewer", low=0
    )


class FedBE(Method):
    """Teachers are the clients, their mean and the samples; their class probabilities are averaged.

    The student is trained by SGD with a cyclical learning rate, and the result is the mean of the students at the
    cycles' ends (stochastic weight averaging).
    """

    name = "fedbe"
    summary = "FedDF with sampled teachers and stochastic weight averaging"
    citation = "Chen and Chao, ICLR 2021"
    needs = Needs(server_data="unlabeled", client_models=True, classes=True)
    Settings = FedBESettings
    settings: FedBESettings

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        """Sample, distill, average."""
        chosen, problem = self.settings, server.problem
        x, _ = server.samples
        steps = chosen.epochs * -(-len(x) // chosen.batch_size)
        if not steps:
            return ServerOutput(model, state)
        teachers = [problem.predict(teacher, x).softmax(1) for teacher in self.teachers(server)]
        first, swa, student = min(chosen.swa_start, steps // 2), Mean("uniform"), model
        for done, student in distill(
            self.name,
            model,
            torch.stack(teachers).mean(0),
            server,
            optimizer="momentum",
            batch_size=chosen.batch_size,
            steps=steps,
            rate=self.rate,
        ):
            if done > first and (done % chosen.cycle == 0 or done == steps):
                swa.add_tree(tree.to(tree.only(student, problem.trainable), "cpu"))
        student = tree.to(tree.clone_contiguous(student), "cpu")
        return ServerOutput(student | swa.mean(), state, {"distillation_steps": steps})

    def rate(self, step: int) -> float:
        """From `lr` down to `lr_end` in a straight line, again in every cycle."""
        chosen = self.settings
        done = (step % chosen.cycle) / max(1, chosen.cycle - 1)
        return float(chosen.lr + (chosen.lr_end - chosen.lr) * done)

    def teachers(self, server: ServerContext) -> Iterator[Tree]:
        """The clients' models, their mean and the samples, one at a time; the samples have the mean's buffers."""
        yield from (update.model for update in server.updates)
        yield server.average
        rng = server.problem.seeds.rng("fedbe-samples", server.round)
        parts = [tree.only(update.model, server.problem.trainable) for update in server.updates]
        for _ in range(self.settings.samples):
            if self.settings.distribution == "dirichlet":
                yield server.average | _mixed(parts, rng, self.settings.concentration)
            else:
                yield server.average | _gaussian(parts, rng)


def _gaussian(parts: list[Tree], rng: np.random.Generator) -> Tree:
    """A draw from the Gaussian with the models' mean and, coordinate by coordinate, their variance."""
    drawn = {}
    for name, first in parts[0].items():
        values = torch.stack([part[name] for part in parts])
        noise = torch.from_numpy(rng.standard_normal(first.shape)).to(first.dtype)
        drawn[name] = values.mean(0) + values.std(0, correction=0) * noise
    return drawn


def _mixed(parts: list[Tree], rng: np.random.Generator, concentration: float) -> Tree:
    """A mean of the models with random weights."""
    mean = Mean("uniform")
    for part, weight in zip(parts, rng.dirichlet([concentration] * len(parts)), strict=True):
        mean.add_tree(part, float(weight))
    return mean.mean()

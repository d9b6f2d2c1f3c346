"""Quality measures of D_syn, as in the paper's figures: does training on it follow the trajectory, and how well?

They compare with real samples and with noise, so they need a simulation: a server has no real samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynafed.synthesis.matching import distance_between, inner_problem, rates_by_name
from dynafed.synthesis.refine import train_on
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.synthesize import Segments, loss_scale
from dynafed.synthesis.synthetic import SyntheticData
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.engine.federation import Federation

SCRATCH = ("adam", 1e-3, 300)
"""How a network is trained from scratch on D_syn: optimizer, learning rate, steps."""


@dataclass(frozen=True)
class Quality:
    """Quality of one synthetic dataset; measures by segment are keyed by the index of the segment's start."""

    matching_by_segment: dict[int, float]
    """Matching loss at the end of the segment after the inner steps."""
    cosine_by_segment: dict[str, dict[int, float]]
    """Cosine distance to the end of the segment, after as many steps on D_syn, on real samples, on noise."""
    scratch_accuracy: float
    """Accuracy of a fresh network trained on D_syn alone."""


def measure_quality(federation: Federation, segments: Segments, synthetic: SyntheticData) -> Quality:
    """Compute all measures; random choices come from the run's seeds."""
    problem = federation.problem
    count, classes = synthetic.logits.shape
    rng = problem.seeds.rng("quality")
    x, y = federation.data.draw(count, rng, problem.device)
    noise = torch.from_numpy(rng.standard_normal(synthetic.x.shape, dtype=np.float32)).to(problem.device)
    random_labels = torch.from_numpy(rng.integers(0, classes, count)).to(problem.device)
    datasets = {
        "D_syn": (synthetic.x.to(problem.device), synthetic.labels.to(problem.device)),
        "real samples": (x, F.one_hot(y, classes).float()),
        "noise": (noise, F.one_hot(random_labels, classes).float()),
    }
    threads = federation.execution.server_threads
    reached = {
        name: _reached(problem.network, segments, *each, synthetic.lr, threads) for name, each in datasets.items()
    }
    return Quality(
        _matching_losses(segments, reached["D_syn"]),
        {name: _cosine_distances(segments, ends) for name, ends in reached.items()},
        scratch_accuracy(federation, synthetic),
    )


def evidence_for(federation: Federation) -> Callable[[Segments, SyntheticData], Quality] | None:
    """What measures D_syn on a simulation's data, if `dynafed.evidence` asks for it."""
    settings = federation.config.sections.get("dynafed")
    wanted = isinstance(settings, DynaFedSettings) and settings.evidence
    return partial(measure_quality, federation) if wanted else None


def matching_by_segment(
    module: nn.Module, segments: Segments, synthetic: SyntheticData, threads: int = 0
) -> dict[int, float]:
    """The matching loss at the end of every segment; needs no real samples."""
    device = next(module.parameters()).device
    x, labels = synthetic.x.to(device), synthetic.labels.to(device)
    return _matching_losses(segments, _reached(module, segments, x, labels, synthetic.lr, threads))


def scratch_accuracy(federation: Federation, synthetic: SyntheticData) -> float:
    """The accuracy of a freshly initialized network that is trained on D_syn alone."""
    from dynafed.engine.evaluation import evaluate

    problem = federation.problem
    fresh = copy.deepcopy(problem.network)
    with problem.seeds.torch_seeded("scratch"):
        for layer in fresh.modules():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
    weights = {name: tensor.detach() for name, tensor in fresh.state_dict().items()}
    optimizer, lr, steps = SCRATCH
    rng, threads = problem.seeds.rng("scratch"), federation.execution.server_threads
    trained = train_on(problem.network, weights, synthetic, optimizer, lr, steps, rng=rng, threads=threads)
    return float(evaluate(federation, trained)["accuracy"])


def _reached(
    module: nn.Module, segments: Segments, x: Tensor, labels: Tensor, lr: float | Tensor, threads: int
) -> list[Tree]:
    """The parameters after the inner steps on these samples, from the start of every segment."""
    config = segments.config
    ends = []
    rates = rates_by_name(lr, [name for name, tensor in module.named_parameters() if tensor.requires_grad])
    scale = loss_scale(config, labels.shape[1]) / len(x)
    with inner_problem(module, labels, scale, config.chunk, threads) as inner:
        for segment in segments.full():
            params = segment.start
            for _ in range(config.inner_steps):
                params, _ = inner.step(params, x, rates)
            ends.append(params)
    return ends


def _matching_losses(segments: Segments, ends: list[Tree]) -> dict[int, float]:
    kind = "l2" if segments.invariances is None else "quotient"
    return {
        segment.index: float(distance_between(kind, end, segment.start, segment.target, segments.invariances))
        for segment, end in zip(segments.full(), ends, strict=True)
    }


def _cosine_distances(segments: Segments, ends: list[Tree]) -> dict[int, float]:
    project = dict if segments.invariances is None else segments.invariances.project
    return {
        segment.index: float(distance_between("cosine", project(end), {}, project(segment.target)))
        for segment, end in zip(segments.full(), ends, strict=True)
    }

"""Linear directions of parameter space that a network's predictions don't depend on, found by trying them.

Cross-entropy has no gradient along such a direction, so no training data can make the parameters move there. Examples:
the same vector added to every class's row of the last layer (softmax cancels a shift of all logits), and the bias of a
convolution whose output is normalized per channel.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dynafed.seeds import Seeds
from dynafed.tree import Tree

log = logging.getLogger("dynafed")

POINTS, INPUTS = 3, 4
"""Random parameters and random inputs at which a direction is tried."""
TOLERANCE = 1e-8
"""Largest change of the log-probabilities, relative to their size, that counts as none in double precision."""


@dataclass(frozen=True)
class Invariances:
    """For each parameter tensor that has some: in how many groups of consecutive rows (dim 0) it can be shifted.

    All rows of a group may change by the same vector, any vector for any group, without an effect on the predictions.
    One group is a shift of all rows; as many groups as rows means that the whole tensor has no effect.
    """

    groups: Mapping[str, int] = field(default_factory=dict)

    def project(self, difference: Tree) -> Tree:
        """A difference of parameters without its components along the invariances (an orthogonal projection)."""
        return {name: self._project(name, tensor) for name, tensor in difference.items()}

    def shares(self, difference: Tree) -> dict[str, float]:
        """For each tensor with invariances, the share of the whole squared difference that `project` removes."""
        whole = {name: float(tensor.double().square().sum()) for name, tensor in difference.items()}
        kept = {name: float(self._project(name, difference[name].double()).square().sum()) for name in self.groups}
        total = sum(whole.values()) or 1.0
        return {name: (whole[name] - kept[name]) / total for name in kept}

    def is_unused(self, name: str, tensor: Tensor) -> bool:
        """Whether the whole tensor has no effect."""
        return self.groups.get(name) == _rows(tensor)

    def _project(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.groups:
            return tensor
        if self.is_unused(name, tensor):
            return torch.zeros_like(tensor)
        grouped = tensor.reshape(self.groups[name], -1, *tensor.shape[1:])
        return (grouped - grouped.mean(dim=1, keepdim=True)).reshape(tensor.shape)


def find_invariances(model: nn.Module, shape: tuple[int, ...]) -> Invariances:
    """The invariances of a network for samples of this shape, tried at random parameters in double precision.

    A direction is accepted if the log-probabilities of random inputs stay the same at several random points. A network
    that doesn't run in double precision has none.
    """
    network = copy.deepcopy(model).to("cpu", torch.float64).eval()
    params = {name: parameter.detach() for name, parameter in network.named_parameters() if parameter.requires_grad}
    rng = Seeds(0).rng("invariances")
    x = torch.from_numpy(rng.standard_normal((INPUTS, *shape)))
    points = [{name: _random(tensor, rng) for name, tensor in params.items()} for _ in range(POINTS)]
    try:
        with torch.no_grad():
            expected = [_log_probabilities(network, point, x) for point in points]
            groups = {name: _groups(network, name, points, expected, x, rng) for name in params}
    except RuntimeError as error:
        log.warning("no invariances of the network are known: it doesn't run in double precision (%s)", error)
        return Invariances()
    return Invariances({name: count for name, count in groups.items() if count})


def _groups(
    network: nn.Module, name: str, points: list[Tree], expected: list[Tensor], x: Tensor, rng: np.random.Generator
) -> int:
    """The largest number of groups of rows that can be shifted without an effect; 0 if there is none."""
    rows = _rows(points[0][name])

    def has_no_effect(groups: int) -> bool:
        for point, before in zip(points, expected, strict=True):
            tensor = point[name]
            shift = (
                torch.from_numpy(rng.standard_normal((groups, 1, *tensor.shape[1:]))) * tensor.square().mean().sqrt()
            )
            shifted = (tensor.reshape(groups, -1, *tensor.shape[1:]) + shift).reshape(tensor.shape)
            after = _log_probabilities(network, point | {name: shifted}, x)
            # NaN is a difference.
            if not (after - before).abs().max() <= TOLERANCE * (1 + before.abs().max()):
                return False
        return True

    # A shift of all rows is among the shifts of any number of groups.
    if not rows or not has_no_effect(1):
        return 0
    return next(count for count in range(rows, 0, -1) if rows % count == 0 and (count == 1 or has_no_effect(count)))


def _log_probabilities(network: nn.Module, params: Tree, x: Tensor) -> Tensor:
    logits: Tensor = functional_call(network, params, (x,))
    return logits.log_softmax(dim=1)


def _random(tensor: Tensor, rng: np.random.Generator) -> Tensor:
    """Normally distributed; for weights, scaled so that activations keep their size."""
    inputs = max(tensor[0].numel(), 1) if tensor.ndim > 1 and len(tensor) else 1
    return torch.from_numpy(np.asarray(rng.standard_normal(tuple(tensor.shape)) / math.sqrt(inputs)))


def _rows(tensor: Tensor) -> int:
    return len(tensor) if tensor.ndim else 1

"""A network that makes features of a wanted class from noise, and what it is trained for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynafed.tree import Tree


def fresh(noise: int, classes: int, hidden: int, width: int) -> Tree:
    """Initial weights, of torch's generator: noise and a one-hot label in, `width` features out."""
    net = nn.Sequential(
        nn.Linear(noise + classes, hidden),
        nn.BatchNorm1d(hidden, track_running_stats=False),
        nn.ReLU(),
        nn.Linear(hidden, width),
    )
    return {name: tensor.detach() for name, tensor in net.named_parameters()}


def generate(net: Tree, noise: Tensor, labels: Tensor) -> Tensor:
    """Features of the given labels, one for each row of noise."""
    classes = net["0.weight"].shape[1] - noise.shape[1]
    one_hot = torch.eye(classes, device=noise.device)[labels]  # unlike F.one_hot, it looks at no value
    hidden = F.linear(torch.cat([noise, one_hot], 1), net["0.weight"], net["0.bias"])
    hidden = F.batch_norm(hidden, None, None, net["1.weight"], net["1.bias"], training=True)
    return F.linear(hidden.relu(), net["3.weight"], net["3.bias"])


def generator_loss(
    net: Tree,
    heads: Callable[[Tensor], Tensor],
    trust: Tensor,
    noise: Tensor,
    labels: Tensor,
    diversity: float,
) -> Tensor:
    """How wrong the clients' heads are about generated features, and how alike features of unlike noise are.

    `heads` gives the logits of all clients' heads, stacked; `trust[i, y]` is client i's share of all samples with
    label y.
    """
    features = generate(net, noise, labels)
    logits = heads(features)
    wrong = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits)), reduction="none").view(len(logits), -1)
    unlike = torch.cdist(noise, noise).square() / noise.shape[1]
    apart = torch.cdist(features, features, p=1) / features.shape[1] * unlike
    return (trust[:, labels] * wrong).sum(0).mean() + diversity * torch.exp(-apart.mean())


def all_heads(head: Callable[[Tree, Tensor], Tensor], weights: Sequence[Tree]) -> Callable[[Tensor], Tensor]:
    """What gives the logits of features by each of these heads, stacked."""
    stacked = {name: torch.stack([each[name] for each in weights]) for name in weights[0]}
    return partial(torch.func.vmap(head, in_dims=(0, None)), stacked)


def cumulative(shares: Tensor) -> np.ndarray:
    """The distribution function of labels with these shares, as `Generator.choice` makes it."""
    exact = shares.cpu().double()
    summed: np.ndarray = (exact / exact.sum()).numpy().cumsum()
    summed /= summed[-1]
    return summed


def draw_inputs(
    labels: np.ndarray, size: int, noise: int, rng: np.random.Generator, device: torch.device, more: int = 0
) -> tuple[Tensor, Tensor]:
    """`size` labels by their distribution function, and rows of noise: one for each label, and `more`."""
    drawn = torch.from_numpy(labels.searchsorted(rng.random(size), side="right"))  # Generator.choice, with less ado
    rows = torch.from_numpy(rng.standard_normal((size + more, noise)))
    return drawn.to(device), rows.to(device, torch.float32)

"""The client's half of differential privacy, a transform, and the server's, which takes the average's place.

McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018; adaptive clipping: Andrew et al.,
Differentially Private Learning with Adaptive Clipping, NeurIPS 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from dynafed import tree
from dynafed.engine.files import checksum
from dynafed.errors import UserError
from dynafed.messages import Broadcast, Update
from dynafed.methods.base import Combined, Combiner, Method, ServerContext, ServerOutput
from dynafed.privacy.accountant import noise_for, spent
from dynafed.privacy.settings import DpSettings, dp_settings
from dynafed.problem import Problem
from dynafed.seeds import Seeds
from dynafed.transforms import UpdateTransform
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.config import Config

NAME = "dp"
ROUNDING = 1e-6
"""A norm that is so little above the clipping norm was clipped."""
COUNT_SHARE = 0.1
"""Adaptive clipping: the share of a round's privacy loss that counting the clipped updates costs."""
ADAPT_RATE = 0.2
"""Adaptive clipping: how fast the norm follows."""


class Clip(UpdateTransform):
    """Clips a client's change of the model; with local noise, adds it. Whole numbers stay as the server sent them."""

    name = NAME
    Settings = DpSettings

    def encode(self, update: Update, broadcast: Broadcast, seeds: Seeds) -> Update:
        """The update that the server may see."""
        norm, multiplier = (float(broadcast.extras[NAME][key]) for key in ("clip", "noise"))
        change = clipped(tree.difference(update.model, broadcast.model), norm)[0]
        if self.settings.where == "local":
            change = _noisy(change, multiplier * norm, self.settings.secret, seeds, broadcast.round, update.client)
        model = {name: tensor + change.get(name, 0) for name, tensor in broadcast.model.items()}
        # The local loss would tell about the data, too.
        return replace(update, model=tree.map_tensors(lambda a, b: a.to(b.dtype), model, broadcast.model), loss=0.0)


class PrivateMean:
    """The sum of clipped changes with Gaussian noise, by the number of clients sampled, whether they came or not."""

    def __init__(self, server: ServerContext, settings: DpSettings, sampled: int, clip: float, noise: float) -> None:
        self.server, self.settings, self.sampled, self.clip = server, settings, sampled, clip
        self.adaptive = settings.clipping == "adaptive"
        self.deviation = 0.0 if settings.where == "local" else noise * clip
        if self.adaptive:
            # Both releases together cost what the accountant counts: 1/z^2 is shared out.
            self.deviation = noise * clip / math.sqrt(1 - COUNT_SHARE)
        self.count_deviation = noise / 2 / math.sqrt(COUNT_SHARE)
        self.sums: Tree = {}
        self.whole = 0

    def add(self, update: Update) -> None:
        """Add one change, which is clipped again: a client may not have done it. A mean counts for all its members."""
        change = tree.difference(update.model, self.server.global_model)
        if self.settings.where == "central":
            change, whole = clipped(change, self.clip)
            self.whole += whole
        for name, tensor in change.items():
            self.sums[name] = self.sums.get(name, torch.zeros(tensor.shape, dtype=torch.float64)) + tensor * (
                len(update.members) or 1
            )

    def result(self) -> Combined:
        """The released average, and how many updates were not clipped, with noise."""
        secret, seeds, round_num = self.settings.secret, self.server.problem.seeds, self.server.round
        noisy = _noisy(self.sums, self.deviation, secret, seeds, round_num) if self.deviation else self.sums
        start = self.server.global_model
        model = {
            name: tree.cast(tensor + noisy[name] / self.sampled, tensor.dtype) if name in noisy else tensor
            for name, tensor in start.items()
        }
        if not self.adaptive:
            return Combined(model)
        rng = _rng(secret, seeds, round_num, "count")
        share = (self.whole + self.count_deviation * rng.standard_normal()) / self.sampled
        return Combined(model, {"dp_share_below_clip": min(1.0, max(0.0, share))})


class PrivateAverage(Method, register=False):
    """The server's half: noise in the average, and the ledger. Whatever comes after it is post-processing."""

    name = NAME
    summary = "the mean of clipped updates with Gaussian noise"
    citation = "McMahan et al., ICLR 2018"
    Settings = DpSettings
    settings: DpSettings

    @classmethod
    def of(cls, config: Config) -> PrivateAverage | None:
        """The step of a config that asks for differential privacy."""
        return cls(config) if dp_settings(config) else None

    def incompatibility(self, others: Sequence[Method]) -> str | None:
        """What clients send beside the model would carry no noise; nor would each client's model."""
        for other in others:
            if other.overrides("extras_spec", "setup_client"):
                return f"{other.name}'s clients send something beside the model, which dp adds no noise to"
            if other.needs.client_models and self.settings.where == "central":
                return f"{other.name} learns from each client's model, and with dp only the average has noise"
        return None

    def init_server(self, problem: Problem, model: Tree) -> Tree:
        """The clipping norm, the noise multiplier, and an empty ledger."""
        chosen, config = self.settings, self.config
        noise = chosen.noise or noise_for(
            chosen.epsilon, config.rounds, problem.clients, config.sampled, chosen.delta, chosen.where == "local"
        )
        spent(noise, 1, problem.clients, config.sampled, chosen.delta)  # fails now if there is no accountant
        return {
            "clip": torch.tensor(chosen.clip, dtype=torch.float64),
            "noise": torch.tensor(noise, dtype=torch.float64),
            "releases": torch.tensor(0),
        }

    def broadcast(self, state: Tree) -> Tree:
        """The clipping norm and the noise multiplier; refused if another round would cost more than the budget."""
        if self.settings.epsilon and self._spent(state, 1) > self.settings.epsilon * (1 + 1e-9):
            raise UserError(
                f"dp.epsilon = {self.settings.epsilon:g} is spent after {int(state['releases'])} rounds: the noise was "
                "chosen for as many as the run had when it began"
            )
        return {"clip": state["clip"], "noise": state["noise"]}

    def combiner(self, server: ServerContext) -> Combiner:
        """The noisy mean."""
        sent = server.sent[NAME]
        return PrivateMean(server, self.settings, self.config.sampled, float(sent["clip"]), float(sent["noise"]))

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        """Enter the round into the ledger, and move the clipping norm."""
        after = state | {"releases": state["releases"] + 1}
        if self.settings.clipping == "adaptive":
            excess = server.combined["dp_share_below_clip"] - self.settings.quantile
            after["clip"] = state["clip"] * math.exp(-ADAPT_RATE * excess)
        metrics = {"epsilon": self._spent(after), "clip_norm": float(state["clip"])}
        return ServerOutput(model, after, metrics)

    def _spent(self, state: Tree, more: int = 0) -> float:
        config, chosen = self.config, self.settings
        releases = int(state["releases"]) + more
        return spent(
            float(state["noise"]), releases, config.clients, config.sampled, chosen.delta, chosen.where == "local"
        )


def clipped(change: Tree, norm: float) -> tuple[Tree, bool]:
    """The change scaled down to a norm, and whether it was small enough already."""
    length = tree.norm(change)
    if length <= norm * (1 - ROUNDING):
        return change, True
    if length <= norm * (1 + ROUNDING):
        return change, False
    return {name: tensor * (norm / length) for name, tensor in change.items()}, False


def _noisy(change: Tree, deviation: float, secret: str, seeds: Seeds, *place: int) -> Tree:
    rng = _rng(secret, seeds, *place)
    return {
        name: change[name] + torch.from_numpy(rng.standard_normal(tuple(change[name].shape))).mul(deviation)
        for name in sorted(change)
    }


def _rng(secret: str, seeds: Seeds, *place: int | str) -> np.random.Generator:
    """A generator for noise; its key has the secret in it, if there is one."""
    if not secret:
        return seeds.rng("dp", *place)
    try:
        return seeds.rng("dp", checksum(Path(secret).expanduser().read_bytes()), *place)
    except OSError as error:
        raise UserError(f"dp.secret = '{secret}' can't be read: {error.strerror}") from None

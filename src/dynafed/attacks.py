"""Clients that attack, for experiments: section `attack` of a config. Without it, nothing here runs.

An attacker trains as every client does. Then it sends something else in its update's place, or it trained on poisoned
data. What it does depends on its update, the broadcast and the seeds only, so it is the same on every backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dynafed import tree
from dynafed.errors import UserError
from dynafed.messages import Broadcast, Update
from dynafed.methods.base import ClientView
from dynafed.problem import BATCH, Problem
from dynafed.seeds import Seeds
from dynafed.settings import plain, setting
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.engine.federation import Federation

KINDS = (
    *("none", "sign-flip", "scaled", "gaussian", "label-flip", "backdoor"),
    *("huge", "nan", "stale", "little-is-enough"),
)
HUGE = 1e30
"""What kind = huge sends in place of every number: finite, and of no use."""
TRIGGER_SIZE, TRIGGER_VALUE = 3, 3.0
"""The backdoor's trigger: a corner of so many pixels (or the last features) with this value, after normalization."""
BACKDOORED = 0.5
"""The share of a backdoor attacker's samples that get the trigger and the target label."""


@dataclass(frozen=True)
class AttackSettings:
    """Section `attack`: for experiments on robustness."""

    kind: str = setting("none", "what the attackers do", choices=KINDS)
    share: float = setting(0.2, "of all clients that attack, drawn by the seed", low=0, high=1)
    rounds: tuple[int, ...] = setting((), "the first and the last round in which they attack (empty: all)", low=1)
    scale: float = setting(10.0, "factor of the update, for sign-flip and scaled; of its size, for gaussian", above=0)
    target: int = setting(0, "the class that the backdoor's trigger is to be taken for", low=0)
    z: float = setting(1.5, "standard deviations from the colluders' mean, for little-is-enough", above=0)
    colluders: int = setting(
        5, "attackers whose honest updates a little-is-enough attacker computes in each round, at most", low=2
    )


@dataclass(frozen=True)
class Attack:
    """Who attacks when, and how."""

    settings: AttackSettings
    clients: tuple[int, ...]
    """The attackers, in ascending order."""
    problem: Problem
    view: Callable[[int], ClientView]
    """A colluder's data, for little-is-enough."""

    @classmethod
    def of(cls, config: Config, problem: Problem, view: Callable[[int], ClientView]) -> Attack | None:
        """The attack that a config describes, if it has one."""
        settings = attack_settings(config)
        if settings is None:
            return None
        if settings.kind in ("label-flip", "backdoor") and problem.task.targets != "classes":
            raise UserError(f"attack.kind = '{settings.kind}' needs classes, and loss = '{problem.task.loss}' has none")
        if settings.target >= problem.classes:
            raise UserError(f"attack.target = {settings.target} is no class: the last one is {problem.classes - 1}")
        return cls(settings, draw_attackers(settings.share, problem.clients, problem.seeds), problem, view)

    def acts(self, client: int, round_num: int) -> bool:
        """Whether this client attacks in this round."""
        first, last = self.settings.rounds or (1, round_num)
        return client in self.clients and first <= round_num <= last

    def poison(self, client: ClientView) -> ClientView:
        """The data that an attacker trains on."""
        if self.settings.kind == "label-flip":
            return dataclasses.replace(client, y=self.problem.classes - 1 - client.y)
        if self.settings.kind == "backdoor":
            rng = self.problem.seeds.rng("backdoor", client.client)
            rows = torch.from_numpy(rng.random(len(client.y)) < BACKDOORED).to(client.y.device)
            x = torch.where(rows.view(-1, *[1] * (client.x.dim() - 1)), with_trigger(client.x), client.x)
            return dataclasses.replace(client, x=x, y=torch.where(rows, self.settings.target, client.y))
        return client

    def corrupt(self, update: Update, broadcast: Broadcast, train: Callable[[ClientView], Update]) -> Update:
        """What an attacker sends in its honest update's place. `train` returns another client's honest update."""
        kind, scale = self.settings.kind, self.settings.scale
        rng = self.problem.seeds.rng("attack", broadcast.round, update.client)
        if kind in ("sign-flip", "scaled"):
            factor = -scale if kind == "sign-flip" else scale
            return _changed(update, broadcast, lambda change: {name: factor * d for name, d in change.items()})
        if kind == "gaussian":
            return _changed(update, broadcast, lambda change: _noise(change, scale, rng))
        if kind in ("huge", "nan"):
            value = HUGE if kind == "huge" else torch.nan
            return _changed(
                update, broadcast, lambda change: {name: torch.full_like(d, value) for name, d in change.items()}
            )
        if kind == "stale":
            extras = {name: tree.map_tensors(torch.zeros_like, extra) for name, extra in update.extras.items()}
            return dataclasses.replace(update, model=self.problem.initial_model(), extras=extras)
        if kind == "little-is-enough":
            others = [client for client in self.clients if client != update.client][: self.settings.colluders - 1]
            models = [update.model, *(train(self.view(client)).model for client in others)]
            return dataclasses.replace(update, model=_a_little_off(models, self.settings.z))
        return update

    def success(self, federation: Federation, model: Tree) -> dict[str, float]:
        """For a backdoor: the share of evaluation samples of other classes that the trigger takes to the target."""
        if self.settings.kind != "backdoor":
            return {}
        hits = total = 0
        for start in range(0, federation.evaluation_size(), BATCH):
            x, y = federation.evaluation_data(start, min(start + BATCH, federation.evaluation_size()))
            others = y != self.settings.target
            hits += int((self.problem.predict(model, with_trigger(x[others])).argmax(1) == self.settings.target).sum())
            total += int(others.sum())
        return {"attack_success": hits / max(1, total)}

    def summary(self) -> dict[str, Any]:
        """For summary.json and the report."""
        return {**plain(self.settings), "clients": list(self.clients)}


def attack_settings(config: Config) -> AttackSettings | None:
    """The settings of a config's attack; None if there is none."""
    settings = config.section("attack", AttackSettings)
    if len(settings.rounds) not in (0, 2) or list(settings.rounds) != sorted(settings.rounds):
        raise UserError(f"attack.rounds = {list(settings.rounds)} must be the first and the last round, or empty")
    return None if settings.kind == "none" or not settings.share else settings


def draw_attackers(share: float, clients: int, seeds: Seeds) -> tuple[int, ...]:
    """A share of the clients, rounded, at least one."""
    drawn = seeds.rng("attackers").choice(clients, max(1, round(share * clients)), replace=False)
    return tuple(sorted(int(client) for client in drawn))


def with_trigger(x: Tensor) -> Tensor:
    """Samples with the backdoor's trigger."""
    marked = x.clone()
    corner = marked[..., -TRIGGER_SIZE:] if x.dim() < 3 else marked[..., -TRIGGER_SIZE:, -TRIGGER_SIZE:]
    corner.fill_(TRIGGER_VALUE)
    return marked


def _changed(update: Update, broadcast: Broadcast, corrupt: Callable[[Tree], Tree]) -> Update:
    """The update with another change of the global model, and of what it sends beside it; whole numbers stay."""

    def apply(sent: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Tree:
        change = corrupt(tree.difference(sent, start))
        return {**sent, **{name: start[name] + added for name, added in change.items()}}

    extras = {name: apply(extra, tree.map_tensors(torch.zeros_like, extra)) for name, extra in update.extras.items()}
    return dataclasses.replace(update, model=apply(update.model, broadcast.model), extras=extras)


def _noise(change: Tree, scale: float, rng: np.random.Generator) -> Tree:
    """Gaussian noise, `scale` times as large as the change."""
    numbers = max(1, sum(d.numel() for d in change.values()))
    size = scale * tree.norm(change) / numbers**0.5
    return {
        name: torch.from_numpy(rng.standard_normal(tuple(d.shape))).mul(size).to(d.dtype)
        for name, d in sorted(change.items())
    }


def _a_little_off(models: Sequence[Tree], z: float) -> Tree:
    """Baruch et al., NeurIPS 2019: the mean less z standard deviations, coordinate by coordinate."""

    def away(*values: Tensor) -> Tensor:
        if not values[0].is_floating_point():
            return values[0]
        stacked = torch.stack(values).double()
        return (stacked.mean(0) - z * stacked.std(0, correction=0)).to(values[0].dtype)

    return tree.map_tensors(away, *models)

"""The methods, one file per paper. A file in this folder that defines a `Method` is found without another edit."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynafed.errors import UserError
from dynafed.methods.base import Combiner, Finished, Host, Local, Method, Needs, Refined, Server
from dynafed.methods.fedavg import Mean
from dynafed.settings import nearest
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.engine.plan import Plan

__all__ = [
    "METHODS",
    "SECTIONS",
    "Combiner",
    "Composition",
    "Finished",
    "Host",
    "Local",
    "Mean",
    "Method",
    "Needs",
    "Refined",
    "Server",
    "compose",
    "split",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

METHODS = Method.registry
"""Every method by name."""

SECTIONS: dict[str, type[Any]] = {name: kind.Settings for name, kind in METHODS.items() if kind.Settings is not None}
"""Every method's own settings."""


@dataclass(frozen=True)
class Composition:
    """Methods that work together: one trains the clients, all may refine, in the order they were named."""

    client: Method
    steps: Sequence[Method]

    def combiner(self, plan: Plan) -> Combiner:
        """The one average: a method's own, else the mean."""
        own = [combiner for step in self.steps if (combiner := step.combiner(plan)) is not None]
        return own[0] if own else Mean(plan.config.weighting)

    @property
    def keeps_updates(self) -> bool:
        """Whether any step must see all the clients' models at once; a combiner sees them one by one."""
        return any(step.needs.client_models and type(step).overrides("refine") for step in self.steps)

    @property
    def enrols(self) -> bool:
        """Whether the clients send something before round 1."""
        return type(self.client).overrides("enrol")

    def layout(self, plan: Plan) -> dict[str, Tree]:
        """What an update must hold beside the model."""
        sent = self.client.sends(plan)
        return {self.client.name: sent} if sent else {}


def split(method: str) -> list[str]:
    """The names in `a+b+c`, each checked."""
    names = [name.strip() for name in method.split("+")]
    for name in names:
        if name not in METHODS:
            raise UserError(f"unknown method '{name}': {nearest(name, METHODS)}")
    if len(set(names)) < len(names):
        raise UserError(f"method = '{method}' names a method twice")
    return names


def compose(config: Config) -> Composition:
    """Put the config's methods together, or say why they don't fit."""
    steps = [METHODS[name](config) for name in split(config.method)]
    trainers = [step for step in steps if type(step).trains()]
    averages = [step.name for step in steps if type(step).overrides("combiner")]
    if len(trainers) > 1:
        names = " and ".join(step.name for step in trainers)
        raise UserError(f"method = '{config.method}': {names} both change local training; take one of them")
    if len(averages) > 1:
        raise UserError(f"method = '{config.method}': {' and '.join(averages)} both replace the average; take one")
    if averages and config.weighting != "uniform":
        raise UserError(f"{averages[0]} has weights of its own: set weighting = 'uniform', not '{config.weighting}'")
    for step in steps:
        if step.needs.server_data and not config.server_samples:
            raise UserError(f"{step.name} needs {step.needs.server_data} server data: set server_samples, say to 1000")
        if reason := step.refuses([other for other in steps if other is not step]):
            raise UserError(f"method = '{config.method}': {reason}")
    return Composition(trainers[0] if trainers else steps[0], steps)

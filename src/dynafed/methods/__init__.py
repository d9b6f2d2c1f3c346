"""The methods, one file per paper. A file in this folder that defines a `Method` is found without another edit."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynafed.errors import UserError
from dynafed.methods.base import (
    METHODS,
    AffineCorrection,
    ClientContext,
    ClientOutput,
    ClientView,
    Combined,
    Combiner,
    Method,
    Needs,
    ServerContext,
    ServerOutput,
    ServerRuntime,
)
from dynafed.methods.fedavg import Mean
from dynafed.problem import Problem
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.config import Config

__all__ = [
    "METHODS",
    "AffineCorrection",
    "ClientContext",
    "ClientOutput",
    "ClientView",
    "Combined",
    "Combiner",
    "Composition",
    "Mean",
    "Method",
    "Needs",
    "ServerContext",
    "ServerOutput",
    "ServerRuntime",
    "compose",
    "load",
    "section_types",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


@dataclass(frozen=True)
class Composition:
    """Methods that work together: client halves in order, then server steps in the order they were named."""

    steps: Sequence[Method]
    """All methods, as named."""
    clients: Sequence[Method]
    """Those with a client half; FedAvg's if none has one."""

    @property
    def loss(self) -> Method:
        """The method whose loss the clients minimize."""
        return next((method for method in self.clients if method.changes_loss()), self.clients[0])

    def combiner(self, server: ServerContext) -> Combiner:
        """The one average: a method's own, else the mean."""
        own = [combiner for step in self.steps if (combiner := step.combiner(server)) is not None]
        return own[0] if own else Mean(self.steps[0].config.weighting)

    @property
    def private(self) -> bool:
        """Whether the average has noise, so that what it is made of must stay unknown."""
        return self.steps[0].name == "dp"

    @property
    def keeps_updates(self) -> bool:
        """Whether any server step must see all the clients' models at once; a combiner sees them one by one."""
        return any(step.needs.client_models and type(step).overrides("server_step") for step in self.steps)

    @property
    def counts_steps(self) -> bool:
        """Whether the average goes by the number of steps that clients say they took."""
        return any(step.counts_steps for step in self.steps)

    @property
    def sets_up(self) -> Method | None:
        """The method whose clients send something before round 1, if there is one."""
        return next((method for method in self.clients if type(method).overrides("setup_client")), None)

    @property
    def uses_fedavg_steps(self) -> bool:
        """Whether local training takes exactly the steps of FedAvg."""
        return all(method.uses_fedavg_steps() for method in self.clients)

    @property
    def declares_steps(self) -> bool:
        """Whether local training takes FedAvg's steps or such that a kernel can know."""
        return all(method.uses_fedavg_steps() or method.declares_steps() for method in self.clients)

    def extras_spec(self, problem: Problem) -> dict[str, Tree]:
        """The layout of what an update holds beside the model, by method."""
        specs = {method.name: method.extras_spec(problem) for method in self.clients}
        return {name: spec for name, spec in specs.items() if spec}


def load(method: str) -> list[type[Method]]:
    """The classes that `a+b+package.module:C` names."""
    kinds = []
    for name in (part.strip() for part in method.split("+")):
        kind = METHODS.load(name)
        if not (isinstance(kind, type) and issubclass(kind, Method) and kind.name):
            raise UserError(f"method = '{name}' is not a dynafed.Method with a name")
        kinds.append(kind)
    if len({kind.name for kind in kinds}) < len(kinds):
        raise UserError(f"method = '{method}' names a method twice")
    return kinds


def section_types(kinds: Sequence[type[Method]]) -> dict[str, type[Any]]:
    """The settings of these methods, by section."""
    return {kind.name: kind.Settings for kind in kinds if kind.Settings is not None}


def compose(config: Config) -> Composition:
    """Put the config's methods together, or say why they don't fit."""
    from dynafed.privacy import PrivateAverage
    from dynafed.secure_aggregation import check_secure_aggregation

    steps: list[Method] = [kind(config) for kind in load(config.method)]
    clients = [step for step in steps if type(step).has_client_half()] or steps[:1]
    private = [step for step in (PrivateAverage.of(config),) if step]
    averages = [step.name for step in (*private, *steps) if type(step).overrides("combiner")]
    for role, found in (
        ("have a loss of their own", [step.name for step in clients if step.changes_loss()]),
        ("need a set-up of the clients", [step.name for step in clients if type(step).overrides("setup_client")]),
        ("replace the average", averages),
    ):
        if len(found) > 1:
            raise UserError(f"method = '{config.method}': {' and '.join(found)} both {role}; take one of them")
    for step in (*private, *steps):
        if step.name in averages and step.ignores_weighting and config.weighting != "uniform":
            raise UserError(f"{step.name} has weights of its own: set weighting = 'uniform', not '{config.weighting}'")
        if step.needs.server_data and not config.server_samples:
            raise UserError(f"{step.name} needs {step.needs.server_data} server data: set server_samples, say to 1000")
        if reason := step.incompatibility([other for other in steps if other is not step]):
            raise UserError(f"method = '{config.method}': {reason}")
    check_secure_aggregation(config, [*private, *steps])
    return Composition([*private, *steps], clients)

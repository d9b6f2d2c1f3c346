"""A running mean of the global models: what is evaluated and served is the mean, what clients get is the model itself.

Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, UAI 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dynafed import tree
from dynafed.methods.base import Method, ServerContext, ServerOutput
from dynafed.methods.fedavg import Mean
from dynafed.settings import setting
from dynafed.tree import Tree


@dataclass(frozen=True)
class AverageSettings:
    """Section `average`."""

    kind: str = setting(
        "last",
        "the mean of the last `window` models, an exponential one, or that of all models from round `since` on",
        choices=("last", "exponential", "since"),
    )
    window: int = setting(20, "models in the mean, for kind = last; the server keeps so many", low=1)
    decay: float = setting(0.9, "weight of the mean before, for kind = exponential", low=0, high=1)
    since: int = setting(1, "the first round in the mean, for kind = since", low=1)
    clients_get: str = setting(
        "model", "what the next round starts from: the model, or the mean", choices=("model", "mean")
    )


class RunningMean:
    """The mean of the global models so far. Its state is the last models, or one running sum in double precision."""

    def __init__(self, settings: AverageSettings) -> None:
        self.settings = settings

    def add(self, state: Tree, model: Tree, round_num: int) -> Tree:
        """The state with one more model."""
        if self.settings.kind != "last":
            return self._summed(model, state, round_num)
        models = tree.unnest(state) | {f"{round_num:06d}": tree.clone_contiguous(model)}
        return tree.nest({number: models[number] for number in sorted(models)[-self.settings.window :]})

    def mean(self, state: Tree, like: Tree) -> Tree:
        """The mean, in the order and the dtypes of a model; whole-number buffers are rounded."""
        if self.settings.kind != "last":
            return {name: tree.cast(state[f"sum/{name}"] / state["weight"], own.dtype) for name, own in like.items()}
        mean = Mean("uniform")
        for model in tree.unnest(state).values():
            mean.add_tree(tree.only(model, like))
        return mean.mean()

    def _summed(self, model: Tree, state: Tree, round_num: int) -> Tree:
        """The running sum with one more model, and the sum of the weights; the first model begins it."""
        chosen = self.settings
        keep, weight = (chosen.decay, 1 - chosen.decay) if chosen.kind == "exponential" else (1.0, 1.0)
        sums = {f"sum/{name}": tensor.double() for name, tensor in model.items()}
        sums["weight"] = torch.ones((), dtype=torch.float64)
        if not state or (chosen.kind == "since" and round_num <= chosen.since):
            return sums
        return {name: keep * state[name] + weight * tensor for name, tensor in sums.items()}


class Average(Method):
    """Comes last in a composition, and needs nothing but the global model: it goes with secure aggregation."""

    name = "average"
    summary = "evaluates and serves a running mean of the global models"
    citation = "Izmailov et al., UAI 2018"
    Settings = AverageSettings
    settings: AverageSettings

    def incompatibility(self, others: Sequence[Method]) -> str | None:
        """A step after it would change a model that isn't in the mean."""
        last = self.config.method.split("+")[-1].strip()
        return None if last == self.name or last.endswith(":Average") else "average must be the last step"

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        """Add the round's model to the mean."""
        running = RunningMean(self.settings)
        state = running.add(state, model, server.round)
        mean = running.mean(state, model)
        if self.settings.clients_get == "mean":
            return ServerOutput(mean, state)
        return ServerOutput(model, state, served=mean)

"""Server optimizers: the difference of the clients' average and the old global model is a gradient to step along.

Reddi et al., Adaptive Federated Optimization, ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynafed.methods.base import Method, ServerContext, ServerOutput
from dynafed.problem import Problem
from dynafed.settings import setting
from dynafed.tree import Tree, map_tensors, nest, only, unnest


@dataclass(frozen=True)
class AdaptiveSettings:
    """Sections `fedadam` and `fedyogi`."""

    lr: float = setting(0.01, "of the server; the paper tunes it per task", above=0)
    beta1: float = setting(0.9, "decay of the first moment", low=0, high=1)
    beta2: float = setting(0.99, "decay of the second moment", low=0, high=1)
    tau: float = setting(1e-3, "added to the root of the second moment", above=0)


class ServerOptimizer(Method):
    """Steps from the old global model along delta = new - old; buffers are taken from the new one as they are."""

    def incompatibility(self, others: Sequence[Method]) -> str | None:
        """Two of them would each undo the other's scale."""
        second = [other.name for other in others if isinstance(other, ServerOptimizer)]
        return f"{self.name} and {second[0]} are both server optimizers; take one" if second else None

    def init_server(self, problem: Problem, model: Tree) -> Tree:
        """The moments before the first step."""
        trainable = only(model, problem.trainable)
        return nest(
            {
                name: map_tensors(lambda t, v=value: torch.full_like(t, v), trainable)
                for name, value in self.moments().items()
            }
        )

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        """One step of the optimizer."""
        moments, stepped = unnest(state), dict(model)
        for name in server.problem.trainable:
            old = {moment: values[name] for moment, values in moments.items()}
            step, new = self.step(model[name] - server.global_model[name], old)
            stepped[name] = server.global_model[name] + self.settings.lr * step
            for moment, value in new.items():
                moments[moment][name] = value
        return ServerOutput(stepped, nest(moments))

    def moments(self) -> dict[str, float]:
        """The names of the moments, and their first values."""
        raise NotImplementedError

    def step(self, delta: Tensor, moments: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The direction of one tensor's step, and its new moments."""
        raise NotImplementedError


class FedAdam(ServerOptimizer):
    """m and v are running means of delta and of its square; w = w_old + lr * m / (sqrt(v) + tau)."""

    name = "fedadam"
    summary = "Adam on the server"
    citation = "Reddi et al., ICLR 2021"
    Settings = AdaptiveSettings
    settings: AdaptiveSettings

    def moments(self) -> dict[str, float]:
        """The paper starts v at tau^2."""
        return {"m": 0.0, "v": self.settings.tau**2}

    def step(self, delta: Tensor, moments: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Along the first moment, scaled by the second."""
        chosen = self.settings
        m = chosen.beta1 * moments["m"] + (1 - chosen.beta1) * delta
        v = self.second(moments["v"], delta.square())
        return m / (v.sqrt() + chosen.tau), {"m": m, "v": v}

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The new second moment."""
        beta2 = self.settings.beta2
        return beta2 * v + (1 - beta2) * square


class FedYogi(FedAdam):
    """FedAdam whose v moves by a fixed share of delta^2, up or down, and so forgets more slowly."""

    name = "fedyogi"
    summary = "Yogi on the server"

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The new second moment."""
        beta2 = self.settings.beta2
        return v - (1 - beta2) * square * torch.sign(v - square)

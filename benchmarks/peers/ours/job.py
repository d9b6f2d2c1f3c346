"""A workload as a config of ours, and a proof that a client does the steps that it is said to do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynafed
from dynafed import models
from dynafed.engine.federation import Federation
from dynafed.execution import single_thread
from peers.protocol import MOON_MU, MOON_TEMPERATURE, PROX_MU, Workload
from peers.torch_side import OPTIMIZERS, network, parameters

CLEAR = 5.0
"""The engine's client must be so many times closer to the plain loop than that was one step before its end."""

PROVEN = 16
"""A wider ConvNet proves nothing: at 32, torch's own float32 is 3 % of the way from its float64 after 20 steps of Adam,
because rounding opens and closes ReLUs, and a step is 5 %."""


METHODS: dict[str, dict[str, Any]] = {
    "fedprox": {"fedprox.mu": PROX_MU},
    "scaffold": {"scaffold.option": "II"},
    "moon": {"moon.mu": MOON_MU, "moon.temperature": MOON_TEMPERATURE},
}
"""What a method is given."""


def config(workload: Workload, **more: Any) -> dynafed.Config:
    """The workload as a config; everything that it doesn't decide is left as it is by default."""
    built_in = {"model": workload.model, f"{workload.model}.width": workload.width}
    settings = {
        "method": workload.method,
        **METHODS.get(workload.method, {}),
        **({} if factory(workload) else built_in),
        "clients": workload.clients,
        "clients_per_round": workload.per_round,
        "batch_size": workload.batch,
        "optimizer": workload.optimizer,
        "lr": workload.lr,
    }
    return dynafed.Config.load(None, settings | more)


def factory(workload: Workload) -> Callable[[], nn.Module] | None:
    """What makes the network, if it is one that a user brings."""
    return partial(network, workload) if workload.model in ("own", "own mlp", "resnet8") else None


@dataclass(frozen=True)
class Replay:
    """One client, trained by the engine and by a plain loop over the same batches."""

    steps: int
    """Of the plain loop."""
    apart: float
    """The distance between the two results, as a share of the way from the initial model."""
    one_step: float
    """The plain loop's last step, as a share of the same."""


def replay(workload: Workload) -> Replay:
    """Train one client both ways: the engine on its own kernels, as in the long run that is measured, and torch's loop
    in float64. A step more or less would show, and so would other data or another optimizer. In a client's first round,
    SCAFFOLD and MOON are FedAvg.
    """
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(workload.samples, *workload.shape, generator=rng)
    y = torch.randint(workload.classes, (workload.samples,), generator=rng)
    y[-1] = workload.classes - 1
    job = config(workload, clients=1, clients_per_round=1, rounds=1, kernels="own")
    given: dict[str, Any] = {
        "model": factory(workload),
        "train": (x, y),
        "test": (x[-1:], y[-1:]),
        "clients": [range(workload.samples)],
    }
    federation = Federation.create(job.replace(kernels="torch"), **given)
    plain = federation.problem.model.double().train()
    optimizer = OPTIMIZERS[workload.optimizer](plain.parameters(), workload.lr)  # type: ignore[call-arg]
    start = [parameter.detach().clone() for parameter in plain.parameters()]
    pull = PROX_MU if workload.method == "fedprox" else 0.0
    order = torch.from_numpy(federation.problem.seeds.rng("batches", 1, 0).permutation(workload.samples))
    path = [weights(plain)]
    for index in order.split(workload.batch):
        optimizer.zero_grad()
        F.cross_entropy(plain(x[index].double()), y[index]).backward()
        for parameter, before in zip(plain.parameters(), start, strict=True):
            assert parameter.grad is not None
            parameter.grad += pull * (parameter.detach() - before)
        optimizer.step()
        path.append(weights(plain))
    with tempfile.TemporaryDirectory() as folder:
        ours = weights(dynafed.run(job, out=Path(folder) / "run", **given).model)
    way = (path[-1] - path[0]).norm()
    return Replay(
        steps=len(path) - 1,
        apart=float((ours - path[-1]).norm() / way),
        one_step=float((path[-2] - path[-1]).norm() / way),
    )


def weights(module: nn.Module) -> Tensor:
    """All matrices and kernels in a row. Biases before a norm have no gradient but noise, which Adam makes as large."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters() if parameter.ndim > 1])


def proven_steps(workload: Workload) -> tuple[int, int]:
    """How many optimizer steps a client of the engine does, and the number of parameters."""
    proven = replace(workload, width=min(workload.width, PROVEN)) if "mlp" not in workload.model else workload
    with single_thread():  # as the engine's workers; two would round otherwise
        seen = replay(proven)
    if seen.apart * CLEAR > seen.one_step:
        raise AssertionError(f"the engine's client is not {seen.steps} steps of Adam: {seen}")
    return seen.steps, parameters(models.build(config(workload), workload.shape, workload.classes, factory(workload)))

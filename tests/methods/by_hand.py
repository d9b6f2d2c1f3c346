"""A method's functions driven by hand: one number for a model, a parabola for a loss."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from problems import TEST, TRAIN, tiny
from torch import Tensor, nn

from dynafed import tree
from dynafed.engine.federation import Federation
from dynafed.engine.local import local_update
from dynafed.messages import Broadcast, Update
from dynafed.methods import METHODS, ClientContext, ClientOutput, Method, ServerContext, ServerRuntime
from dynafed.models import Classifier
from dynafed.tree import Tree


def federation_for(method: str = "fedavg", model: Callable[..., nn.Module] | None = None, **changes: Any) -> Federation:
    """The blobs; each client takes plain SGD steps with its whole data, so that every step can be predicted."""
    config = tiny(**{"method": method, "optimizer": "sgd", "lr": 0.5, "local_steps": 1, "batch_size": 1000} | changes)
    return Federation.create(config, train=TRAIN, test=TEST, model=model)


def sent(federation: Federation, extras: Tree | None = None, round_num: int = 1) -> Broadcast:
    """The initial model, with extras for the client's method."""
    name = federation.methods.clients[0].name
    return Broadcast(round_num, federation.problem.initial_model(), {name: extras} if extras else {})


def round_context(federation: Federation) -> ServerContext:
    """What the server half sees at the beginning of round 1."""
    return federation.server_side.context(1, federation.problem.initial_model(), ServerRuntime())


def trained(
    federation: Federation, extras: Tree | None = None, memory: Tree | None = None, client: int = 3
) -> tuple[Update, Tree]:
    """One client's round through the engine, and what its method remembers."""
    kept = tree.nest({"method": memory}) if memory else None
    update, after = local_update(federation.client_side, federation.client(client), sent(federation, extras, 2), kept)
    return update, tree.unnest(after).get("method", {})


def noise_like(model: Tree, seed: int) -> Tree:
    """Random numbers in the shape of a model."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in model.items()}


def assert_moved(got: Tree, plain: Tree, by: Tree, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """`got` differs from `plain` by exactly `by`, and `by` is something."""
    assert any(by[name].abs().max() > 1e-3 for name in by)
    for name in by:
        torch.testing.assert_close(got[name] - plain[name], by[name], rtol=rtol, atol=atol)


def made(name: str, **changes: Any) -> Method:
    """A method with settings."""
    return METHODS.load(name)(tiny(**{"method": name, "optimizer": "sgd"} | changes))


def one(value: float) -> Tree:
    """A model of a single number."""
    return {"w": torch.tensor([value], dtype=torch.float64)}


def number(values: Tree, name: str = "w") -> float:
    return float(values[name])


def parabola(
    method: Method,
    start: float,
    target: float,
    steps: int,
    lr: float,
    extras: Tree | None = None,
    memory: Tree | None = None,
) -> tuple[Tree, ClientOutput]:
    """Minimize (w - target)^2 / 2 with the method's correction, by plain gradient steps."""
    local = ClientContext(
        client=0,
        forward=lambda params, x: x,
        global_params=one(start),
        global_buffers={},
        extras=extras or {},
        state=memory or {},
        x=torch.zeros(1),
        y=torch.zeros(1),
        steps=steps,
        lr=lr,
        rng=np.random.default_rng(0),
        features=lambda params, x: x,
        head=lambda params, x: x,
    )
    local = ClientContext(**{**vars(local), "prepared": method.prepare(local)})
    params = one(start)
    for _ in range(steps):
        grads = method.correct_gradients({"w": params["w"] - target}, params, local)
        params = {"w": params["w"] - lr * grads["w"]}
    return params, method.finish(params, local)


def seen_by_server(
    before: float, combined: float, participants: int, clients: int, extras: Tree | None = None
) -> ServerContext:
    """What the server half gets."""
    problem: Any = SimpleNamespace(clients=clients, trainable=("w",))
    return ServerContext(problem, 1, one(before), average=one(combined), extras=extras or {}, participants=participants)


class Noisy(Classifier):
    """Layers that draw from torch's global generator and that keep buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5)), 8, 4)


def gradient(loss: Tensor, params: Tree) -> Tree:
    return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


def leaves(model: Tree) -> Tree:
    return {name: tensor.clone().requires_grad_() for name, tensor in model.items()}

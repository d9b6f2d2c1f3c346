"""The only client loop: every method on every backend trains through `local_update`."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dynafed import optim, tree
from dynafed.engine.federation import ClientSide
from dynafed.engine.steps import LocalSteps
from dynafed.execution import fused_gradient
from dynafed.messages import Broadcast, Update
from dynafed.methods import ClientContext, ClientOutput, ClientView, Method
from dynafed.tree import Tree


def local_update(
    side: ClientSide, client: ClientView, broadcast: Broadcast, state: Tree | None = None, work: float = 1.0
) -> tuple[Update, Tree]:
    """Train the broadcast model on one client's data.

    Returns the update as it is sent, and the client's new state, which it gets back the next time it is sampled.
    `state` is what it returned last time; `work` below 1 is a slow client that does only this share of its steps.
    """
    attack = side.attack if side.attack and side.attack.acts(client.client, broadcast.round) else None
    update, new_state = _train(side, attack.poison(client) if attack else client, broadcast, state, work)
    if attack:
        update = attack.corrupt(update, broadcast, lambda other: _train(side, other, broadcast, None, 1.0)[0])
    return side.transforms.encode(update, broadcast, side.problem.seeds), new_state


def _train(
    side: ClientSide, client: ClientView, broadcast: Broadcast, state: Tree | None, work: float
) -> tuple[Update, Tree]:
    """The update and the new state, before anything happens to them."""
    began = time.perf_counter()
    config, problem = side.config, side.problem
    kept = tree.unnest(state or {})
    received = problem.to_device(broadcast.model)
    weights = tree.clone(received)
    params = tree.only(weights, problem.trainable)
    steps = config.local_steps or config.local_epochs * -(-len(client.y) // config.batch_size)
    steps = max(1, int(steps * work))
    optimizer = optim.Optimizer(
        config.optimizer,
        list(params.values()),
        config.lr_at(broadcast.round),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    if config.client_state == "persistent":
        optimizer.load_state(kept.get("optimizer", {}))
    states = _states_by_method(side, kept.get("method", {}))
    contexts = {
        method.name: _context(side, method, client, broadcast, received, weights, states[method.name], steps)
        for method in side.methods.clients
    }
    problem.network.train()
    losses: list[Tensor] = []
    curve: list[float] = []
    with problem.seeds.torch_seeded("layers", broadcast.round, client.client):
        for method in side.methods.clients:
            context = contexts[method.name]
            contexts[method.name] = replace(context, prepared=method.prepare(context))
        train = LocalSteps.of(side, params, contexts, optimizer)
        shuffle = problem.seeds.rng("batches", broadcast.round, client.client)
        watched = client.client in config.watch
        for order in optim.epoch_orders(len(client.y), config.batch_size, steps, shuffle, pairs=problem.pairs):
            at_once = config.batch_size if watched else len(order)
            for start in range(0, len(order), at_once):
                losses.append(train(client.x, client.y, order[start : start + at_once], config.batch_size))
                if watched:
                    curve.append(problem.mean_loss(weights, client.x, client.y))
        outputs = {
            method.name: _finished(side, method, params, contexts[method.name]) for method in side.methods.clients
        }
    # Added one by one in float32, but here: between two steps an addition takes torch about 10 us.
    total = float(np.add.accumulate(torch.cat(losses).float().cpu().numpy())[-1])
    new_state = {"method": _joined_states(outputs)}
    if config.client_state == "persistent":
        new_state["optimizer"] = optimizer.state()
    update = Update(
        client=client.client,
        model=tree.to(tree.clone_contiguous(weights), "cpu"),
        examples=len(client.y),
        steps=steps,
        loss=total / steps,
        seconds=time.perf_counter() - began,
        extras={name: tree.to(output.extras, "cpu") for name, output in outputs.items() if output.extras},
        curve=tuple(curve),
    )
    return update, tree.to(tree.nest(new_state), "cpu")


def _context(
    side: ClientSide,
    method: Method,
    client: ClientView,
    broadcast: Broadcast,
    received: Tree,
    weights: Tree,
    state: Tree,
    steps: int,
) -> ClientContext:
    """What one method's client half sees."""
    problem = side.problem
    several = len(side.methods.clients) > 1
    return ClientContext(
        client=client.client,
        forward=lambda params, x: problem.forward(weights | params, x),
        global_params=tree.only(received, problem.trainable),
        global_buffers=tree.clone(tree.without(received, problem.trainable)),
        extras=problem.to_device(broadcast.extras.get(method.name, {})),
        state=problem.to_device(state),
        x=client.x,
        y=client.y,
        steps=steps,
        lr=side.config.lr_at(broadcast.round),
        rng=problem.seeds.rng("method", broadcast.round, client.client, *([method.name] if several else [])),
        features=lambda params, x: problem.features(weights | params, x),
        head=lambda params, z: problem.head(weights | params, z),
        task=problem.task,
        fused_gradient=partial(_fused_gradient, side, client) if side.execution.fused_epochs else None,
    )


def _finished(side: ClientSide, method: Method, params: Tree, context: ClientContext) -> ClientOutput:
    """What a method says after the last step."""
    if not method.overrides("finish"):
        return ClientOutput()
    # In the layout of all the other trees, arithmetic with them takes a third of the time.
    as_trained = side.execution.fused_epochs and not method.uses_fedavg_steps()
    return method.finish((tree.clone if as_trained else tree.clone_contiguous)(params), context)


def _fused_gradient(side: ClientSide, client: ClientView, params: Tree) -> Tree:
    """The gradient of the client's mean loss at these parameters, by our kernel."""
    names = side.problem.trainable
    grads = fused_gradient([params[name] for name in names], client.x, client.y, side.execution.activations)
    return dict(zip(names, grads, strict=True))


def _states_by_method(side: ClientSide, state: Tree) -> dict[str, Tree]:
    """Each method's state; a single method's has no name in it."""
    names = [method.name for method in side.methods.clients]
    if len(names) == 1:
        return {names[0]: state}
    found = tree.unnest(state)
    return {name: found.get(name, {}) for name in names}


def _joined_states(outputs: dict[str, ClientOutput]) -> Tree:
    """The inverse of `_states_by_method`."""
    if len(outputs) == 1:
        return next(iter(outputs.values())).state
    return tree.nest({name: output.state for name, output in outputs.items()})

"""The only client loop: every method on every engine trains through `local_update`."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch
from torch import Tensor

from dynafed import optim, tree
from dynafed.engine.gradient import training
from dynafed.engine.plan import Plan
from dynafed.messages import Broadcast, Update
from dynafed.methods import Finished, Local
from dynafed.tree import Tree


def local_update(
    plan: Plan, broadcast: Broadcast, client: int, memory: Tree | None = None, work: float = 1.0
) -> tuple[Update, Tree]:
    """Train the broadcast model on one client's data.

    Returns the update for the server, and what the client remembers until it is sampled again. `memory` is what it
    remembered last time; `work` below 1 is a slow client that does only this share of its steps.
    """
    began = time.perf_counter()
    config, method = plan.config, plan.methods.client
    remembered = tree.unnest(memory or {})

    def arranged(parts: Tree) -> Tree:
        return tree.by_columns(tree.to(parts, plan.device), plan.matrices)

    received = arranged(broadcast.model)
    weights = tree.twin(received)
    params = tree.only(weights, plan.trainable)
    x, y = plan.client_data(client)
    steps = config.local_steps or config.local_epochs * -(-len(y) // config.batch_size)
    steps = max(1, int(steps * work))
    optimizer = optim.Optimizer(
        config.optimizer,
        list(params.values()),
        config.lr_at(broadcast.round),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    if config.client_state == "persistent":
        optimizer.restore(remembered.get("optimizer", {}))
    local = Local(
        client=client,
        forward=lambda params, x: plan.forward(weights | params, x),
        start=tree.only(received, plan.trainable),
        buffers=tree.twin(tree.without(received, plan.trainable)),
        extras=arranged(broadcast.extras.get(method.name, {})),
        memory=arranged(remembered.get("method", {})),
        x=x,
        y=y,
        steps=steps,
        lr=config.lr_at(broadcast.round),
        rng=plan.seeds.rng("method", broadcast.round, client),
        features=lambda params, x: plan.features(weights | params, x),
        head=lambda params, z: plan.head(weights | params, z),
    )
    plan.module.train()
    losses: list[Tensor] = []
    curve: list[float] = []
    with plan.seeds.torch_seeded("layers", broadcast.round, client):
        local = dataclasses.replace(local, carry=method.begin(local))
        train = training(plan, params, local, optimizer)
        shuffle = plan.seeds.rng("batches", broadcast.round, client)
        for order in optim.orders(len(y), config.batch_size, steps, shuffle):
            at_once = config.batch_size if client in config.watch else len(order)
            for start in range(0, len(order), at_once):
                losses.append(train(x, y, order[start : start + at_once], config.batch_size))
                if client in config.watch:
                    curve.append(plan.loss_on(weights, x, y))
        finished = method.finish(tree.clone(params), local) if method.overrides("finish") else Finished()
    # Added one by one in float32, but here: between two steps an addition takes torch about 10 us.
    total = float(np.add.accumulate(torch.cat(losses).float().cpu().numpy())[-1])
    kept = {"method": finished.memory}
    if config.client_state == "persistent":
        kept["optimizer"] = optimizer.moments()
    update = Update(
        client=client,
        model=tree.to(tree.clone(weights), "cpu"),
        examples=len(y),
        steps=steps,
        loss=total / steps,
        seconds=time.perf_counter() - began,
        extras={method.name: tree.to(finished.extras, "cpu")} if finished.extras else {},
        curve=tuple(curve),
    )
    return update, tree.to(tree.nest(kept), "cpu")

"""The only client loop: every method on every engine trains through `local_update`."""

from __future__ import annotations

import dataclasses
import time

import torch

from dynafed import optim, tree
from dynafed.engine.plan import Plan
from dynafed.messages import Broadcast, Update
from dynafed.methods import Local
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
    weights = tree.to(tree.clone(broadcast.model), plan.device)
    params = {name: weights[name].requires_grad_() for name in plan.trainable}
    x, y = plan.client_data(client)
    steps = config.local_steps or config.local_epochs * -(-len(y) // config.batch_size)
    steps = max(1, int(steps * work))
    optimizer = optim.make(
        config.optimizer,
        list(params.values()),
        config.lr_at(broadcast.round),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    if config.client_state == "persistent":
        optim.restore(optimizer, remembered.get("optimizer", {}))
    local = Local(
        client=client,
        forward=lambda params, x: plan.forward(weights | params, x),
        start=tree.to({name: broadcast.model[name] for name in plan.trainable}, plan.device),
        buffers=tree.clone(tree.without(weights, plan.trainable)),
        extras=tree.to(broadcast.extras.get(method.name, {}), plan.device),
        memory=tree.to(remembered.get("method", {}), plan.device),
        x=x,
        y=y,
        steps=steps,
        lr=config.lr_at(broadcast.round),
        rng=plan.seeds.rng("method", broadcast.round, client),
        features=lambda params, x: plan.features(weights | params, x),
        head=lambda params, z: plan.head(weights | params, z),
    )
    plan.module.train()
    total = torch.zeros((), device=plan.device)
    curve: list[float] = []
    with plan.seeds.torch_seeded("layers", broadcast.round, client):
        local = dataclasses.replace(local, carry=method.begin(local))
        order = plan.seeds.rng("batches", broadcast.round, client)
        for batch in optim.batches(len(y), config.batch_size, steps, order):
            index = torch.from_numpy(batch).to(plan.device)
            loss = method.loss(params, x[index], y[index], local)
            grads = dict(
                zip(params, torch.autograd.grad(loss, list(params.values()), materialize_grads=True), strict=True)
            )
            with torch.no_grad():
                grads = method.adjust(grads, params, local)
            for name, parameter in params.items():
                parameter.grad = grads[name]
            optimizer.step()
            total += loss.detach()
            if client in config.watch:
                curve.append(plan.loss_on(weights, x, y))
        finished = method.finish(tree.clone(params), local)
    kept = {"method": finished.memory}
    if config.client_state == "persistent":
        kept["optimizer"] = optim.moments(optimizer)
    update = Update(
        client=client,
        model=tree.to(tree.clone(weights), "cpu"),
        examples=len(y),
        steps=steps,
        loss=float(total) / steps,
        seconds=time.perf_counter() - began,
        extras={method.name: tree.to(finished.extras, "cpu")} if finished.extras else {},
        curve=tuple(curve),
    )
    return update, tree.to(tree.nest(kept), "cpu")

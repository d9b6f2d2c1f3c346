"""Canaries: one client gets a few marked samples. Does anything that leaves the server show them?"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from dynafed.audit.finding import Finding
from dynafed.audit.neighbors import nearness
from dynafed.audit.statistics import auc, with_interval
from dynafed.audit.subject import ALONE, FINAL, Subject, replay, synthetic_of, train_alone, with_data
from dynafed.data import Partition

REFERENCES = 200
"""Marked samples that nobody gets, to compare with."""


def check_canaries(subject: Subject, count: int) -> Finding:
    """Run it again with marked samples in one client's data: samples of its own, each with noise of its own on it."""
    rng, split = subject.seeds.rng("audit", "canaries"), subject.split
    client = int(rng.integers(split.num_clients()))
    rows = split.partition[client]
    source = torch.from_numpy(rng.choice(rows, count + REFERENCES, replace=True))
    stored = split.dataset.train_x[source]
    low, high = (float(edge) for edge in (stored.min(), stored.max()))
    noise = torch.from_numpy(rng.uniform(low, high, size=tuple(stored.shape))).to(stored.dtype)
    marked = torch.where(torch.from_numpy(rng.random(tuple(stored.shape))) < 0.5, noise, stored)
    labels = torch.from_numpy(rng.integers(0, subject.federation.problem.classes, count + REFERENCES))
    first = len(split.dataset.train_y)
    dataset = dataclasses.replace(
        split.dataset,
        train_x=torch.cat([split.dataset.train_x, marked[:count]]),
        train_y=torch.cat([split.dataset.train_y, labels[:count]]),
    )
    lists = [split.partition[each] for each in range(split.num_clients())]
    lists[client] = np.concatenate([rows, first + np.arange(count)])
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in lists])])
    samples = dataclasses.replace(split, dataset=dataset, partition=Partition(np.concatenate(lists), offsets))
    federation = with_data(subject, samples)
    state = replay(federation, federation.config.rounds, "a run with canaries")
    x, y = dataset.schema.to_input((marked, labels), federation.problem.device)
    models, synthetic = {FINAL: state.final_model}, synthetic_of(state)
    if synthetic is not None:
        models[ALONE] = train_alone(federation, synthetic)
    table: list[list[Any]] = []
    numbers: dict[str, Any] = {}
    leaks = False
    for name, model in models.items():
        losses = -subject.losses(model, x, y)
        area = with_interval(auc, losses[:count], losses[count:], rng)
        table.append([name, area.value, f"{area.low:.3f} to {area.high:.3f}"])
        numbers[name] = area.plain()
        leaks |= area.low > 0.5
    found = "; ".join(f"{name}: AUC {area:.2f} [{interval}]" for name, area, interval in table) + ". 0.5 is chance."
    if synthetic is not None:
        everywhere = torch.zeros(len(synthetic.x), dtype=torch.long)
        zeros = torch.zeros(len(x), dtype=torch.long)
        near = nearness(synthetic.x, everywhere, (x[:count], zeros[:count]), (x[count:], zeros[count:]), rng)
        if near is not None:
            found += (
                f" The synthetic samples are {'' if near.p < 0.05 else 'not '}nearer to the canaries than to others "
                f"like them, p = {near.p:.3f}."
            )
            numbers["p_of_distance"] = near.p
            leaks |= near.p < 0.05
    return Finding(
        "Canaries",
        f"The run was made again with {count} canaries in the data of client {client}: its own samples, half covered "
        f"with noise, with random labels. {REFERENCES} others of the kind stayed outside. What has a lower loss on the "
        "canaries than on those, or is nearer to them, remembers them.",
        found,
        f"{count} canaries of one client in one run: a small risk can't be seen with so few.",
        leaks,
        numbers,
        [{"kind": "table", "data": {"columns": ["loss of", "AUC", "95 %"], "rows": table}}],
    )

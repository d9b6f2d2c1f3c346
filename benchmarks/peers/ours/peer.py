"""dynafed's own engine, called as a user calls it, with its default settings."""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

import dynafed
from dynafed.callbacks import Callback, Record, RunContext
from peers.ours.job import config, factory, proven_steps
from peers.protocol import SAMPLES_FOR_LOSS, Turns

FOREVER = 10**9
"""Rounds: the harness says when it has enough."""


class Asked(Callback):
    """Holds the run after every round until the next one is wanted."""

    def __init__(self, turns: Turns, steps: int) -> None:
        self.turns, self.steps = turns, steps

    def on_round_end(self, run: RunContext, record: Record) -> None:
        self.turns.loss = lambda: record["train_loss"]
        self.turns.finished(self.steps * len(record["clients"]))


def main() -> None:
    turns = Turns()
    workload = turns.task.workload
    if turns.task.options.get("own"):
        workload = replace(workload, model=f"own {workload.model}")
    x, y = turns.task.arrays()
    order = np.arange(x.shape[0])
    everyone = [order[workload.rows(client)] for client in range(workload.clients)]
    few = slice(0, min(SAMPLES_FOR_LOSS, len(y)))
    settings = config(workload, rounds=FOREVER, eval_every=FOREVER, **turns.task.options.get("config", {}))
    # In a process of its own: this one is to be as fresh as a user's.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        steps, size = pool.submit(proven_steps, workload).result()
    with tempfile.TemporaryDirectory() as folder:
        turns.ready(size, "dynafed", "torch")
        turns.start()
        dynafed.run(
            settings,
            model=factory(workload),
            train=(x, y),
            test=(x[few], y[few]),
            clients=everyone,
            out=Path(folder) / "run",
            callbacks=[Asked(turns, steps)],
        )


if __name__ == "__main__":
    main()

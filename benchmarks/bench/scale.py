"""C: a million clients: how long a run takes to start, and whether memory and rounds stay as they are.

Every client's samples are made by a function when it is sampled, so that nothing but the engine can grow.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import processes
from bench.sides import CLEARED

CLIENTS, PER_ROUND, ROUNDS = 1_000_000, 1000, 500
PIECES = 10
"""Parts of the run, each with its median round."""


def measure(
    environment: Mapping[str, str], clients: int = CLIENTS, per_round: int = PER_ROUND, rounds: int = ROUNDS
) -> dict[str, Any]:
    """One run in a process of its own."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(CLEARED)} | {**environment}
    places = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), variables.get("PYTHONPATH"))))
    sizes = map(str, (clients, per_round, rounds))
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.run(
            [sys.executable, "-m", "bench.scale", folder, *sizes],
            env=variables | {"PYTHONPATH": places},
            stdout=subprocess.PIPE,
            check=True,
        )
    found: dict[str, Any] = json.loads(child.stdout)
    return found | {"repeats": 1, "clients": clients, "per_round": per_round, "rounds": rounds}


def samples(number: int) -> tuple[Any, Any]:
    """A client's 20 samples of 32 numbers, in ten classes."""
    import numpy as np

    x = np.random.default_rng(number).normal(size=(20, 32)).astype(np.float32)
    return x, x[:, :10].argmax(axis=1)


def run(folder: str, clients: int, per_round: int, rounds: int) -> dict[str, Any]:
    """FedAvg with a small network; the sources are made before the clock starts."""
    from torch import nn

    import dynafed

    sources = [functools.partial(samples, number) for number in range(clients)]
    changes = {"clients": clients, "clients_per_round": per_round, "rounds": rounds, "eval_every": rounds}
    changes |= {"data_memory_mb": 16}  # the samples that were used last stay in memory, up to this: full soon
    config = dynafed.Config.load(None, {"method": "fedavg", "model": "mlp"} | changes)
    began, seen = time.perf_counter(), []

    class Watch(dynafed.Callback):
        started = 0.0

        def on_round_begin(self, run: dynafed.callbacks.RunContext, round_num: int) -> None:
            self.started = self.started or time.perf_counter() - began

        def on_round_end(self, run: dynafed.callbacks.RunContext, record: dict[str, Any]) -> None:
            every = max(1, rounds // PIECES)
            if record["round"] % every == 0:
                median = statistics.median(one["seconds"] for one in run.history[-every:])
                mb = processes.memory_mb(os.getpid())
                seen.append({"round": record["round"], "seconds_a_round": median, "memory_mb": mb})

    watch = Watch()
    dynafed.run(
        config,
        model=lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)),
        clients=sources,
        test=samples(clients),
        classes=10,
        shape=(32,),
        out=Path(folder) / "run",
        callbacks=[watch],
    )
    return {"seconds_to_first_round": watch.started, "points": seen, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], *map(int, sys.argv[2:]))))

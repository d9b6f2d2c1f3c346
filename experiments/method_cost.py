"""CPU time of one client's round and of the server's, for each method and optimizer, on W1 of the benchmarks.

python experiments/method_cost.py [own|torch]

Unlike `make bench BENCH=methods` it needs no quiet machine: it counts the thread's own time, and takes the best.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import torch

from dynafed import Config
from dynafed.engine.federation import Federation
from dynafed.engine.local import local_update
from dynafed.engine.server import server_broadcast, server_setup, server_update
from dynafed.execution import keep_freed_memory
from dynafed.tree import Tree

CLIENTS, SAMPLES, ROUNDS = 32, 750, 6
OPTIMIZERS = ("adam", "adamw", "sgd", "momentum")
METHODS = ("fedprox", "feddyn", "scaffold", "moon", "fedmix", "fedgen")


class Run:
    """A federation whose rounds are taken one by one."""

    def __init__(self, kernels: str, x: np.ndarray, y: np.ndarray, **changes: str) -> None:
        config = Config.load(
            None, {"clients": CLIENTS, "participation": 1.0, "kernels": kernels, "record": False} | changes
        )
        rows = np.array_split(np.arange(len(y)), CLIENTS)
        self.federation = Federation.create(config, train=(x, y), test=(x[:100], y[:100]), clients=rows)
        problem, methods = self.federation.problem, self.federation.methods
        self.model, self.number = problem.initial_model(), 0
        self.server = {step.name: step.init_server(problem, self.model) for step in methods.steps}
        self.clients = [self.federation.client(client) for client in range(CLIENTS)]
        self.states: dict[int, Tree] = {}
        self.seconds: list[list[float]] = [[] for _ in range(CLIENTS + 1)]
        if methods.sets_up:
            setups = [methods.sets_up.setup_client(client) for client in self.clients]
            self.server, _ = server_setup(self.federation.server_side, self.server, setups)

    def round(self) -> None:
        """Train every client, then the server."""
        self.number += 1
        sides, updates = self.federation, []
        broadcast = server_broadcast(sides.server_side, self.number, self.model, self.server)
        for number, client in enumerate(self.clients):
            began = time.thread_time()
            update, self.states[number] = local_update(sides.client_side, client, broadcast, self.states.get(number))
            self.seconds[number].append(time.thread_time() - began)
            updates.append(update)
        began = time.thread_time()
        outcome = server_update(sides.server_side, broadcast, self.server, updates)
        self.seconds[-1].append(time.thread_time() - began)
        self.model, self.server = outcome.model, dict(outcome.server)

    def costs(self) -> tuple[float, float]:
        """Of a client and of the server, in ms; the first round is another one for some methods."""
        best = [1000 * min(seconds[1:]) for seconds in self.seconds]
        return statistics.median(best[:-1]), best[-1]


def main() -> None:
    """Print a line for each; all take turns."""
    torch.set_num_threads(1)
    keep_freed_memory()
    kernels = sys.argv[1] if len(sys.argv) > 1 else "own"
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, CLIENTS * SAMPLES)
    x = rng.standard_normal((len(y), 784), dtype=np.float32) + 0.1 * rng.standard_normal((10, 784), dtype=np.float32)[y]
    runs = {name: Run(kernels, x, y, optimizer=name) for name in OPTIMIZERS}
    runs |= {name: Run(kernels, x, y, method=name) for name in METHODS}
    for _ in range(ROUNDS):
        for run in runs.values():
            run.round()
    plain = sum(share * cost for share, cost in zip((CLIENTS, 1), runs["adam"].costs(), strict=True))
    print("ms:          a client   the server   a round in FedAvg's with Adam")
    for name, run in runs.items():
        client, server = run.costs()
        print(f"{name:10s} {client:10.2f} {server:12.1f} {(CLIENTS * client + server) / plain:12.2f}")


if __name__ == "__main__":
    main()

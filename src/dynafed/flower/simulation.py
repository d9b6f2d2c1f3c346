"""Our clients on Flower's simulation: Ray actors in place of worker processes."""

from __future__ import annotations

import logging
import os
import threading
from functools import cached_property, lru_cache
from pathlib import Path
from queue import Queue
from typing import Any

import ray
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from dynafed.engine.checkpoint import memory_folder
from dynafed.engine.plan import Plan
from dynafed.errors import UserError, WorkerDied
from dynafed.flower.apps import make_client_app
from dynafed.flower.fleet import Fleet
from dynafed.flower.settings import FlowerSettings

PATIENCE = 7 * 24 * 3600.0
"""Seconds for a round, however slow; the end of an actor or of Flower is noticed at once."""


class Simulation(Fleet):
    """One simulated node for each client; `workers` actors that take turns in being them.

    Flower wants to call the server app, and our rounds want to call their workers. So Flower runs in a thread, and its
    server app only hands over the grid, then waits until the rounds are done.
    """

    forgiving = False  # a simulated client that fails is an error, and the same bits can't come out without it

    def __init__(self, plan: Plan, path: Path) -> None:
        if plan.device.type != "cpu":
            raise UserError(
                f"engine = 'flower' simulates on the CPU; device = '{plan.config.device}' needs engine = 'local'"
            )
        self.actors = plan.path.workers
        super().__init__(plan, FlowerSettings(timeout=PATIENCE))
        self.path = path
        self.grids: Queue[Grid | None] = Queue()
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._simulate, name="flower", daemon=True)

    def __enter__(self) -> Simulation:
        super().__enter__()
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()
        super().__exit__(*error)

    @property
    def grid(self) -> Grid:
        """The way to the nodes, as long as the simulation is alive."""
        if self._grid is None:
            self._grid = self.grids.get()
        if self._grid is None or not self.thread.is_alive():
            raise WorkerDied(f"Flower's simulation ended: {self.error}")
        return self._grid

    def _simulate(self) -> None:
        server = ServerApp()

        @server.main()
        def hand_over(grid: Grid, context: Context) -> None:
            self.grids.put(grid)
            self.done.wait()

        shared = Shared(self.plan, memory_folder(self.path.absolute()))
        flower = logging.getLogger("flwr")
        level, pythonpath = flower.level, os.environ.get("PYTHONPATH")
        flower.setLevel(logging.ERROR)
        try:
            run_simulation(
                server,
                make_client_app(shared),
                num_supernodes=self.plan.config.clients,
                backend_config={
                    "init_args": {"num_cpus": self.actors, "logging_level": logging.ERROR, "log_to_driver": False},
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                },
            )
        except BaseException as error:
            self.error = error
        finally:
            self.grids.put(None)
            flower.setLevel(level)
            if pythonpath is None:
                os.environ.pop("PYTHONPATH", None)  # Flower has set it for Ray's processes
            else:
                os.environ["PYTHONPATH"] = pythonpath


class Shared:
    """Gives a client app its plan. Ray's processes get it once, from Ray's store, and not with every message."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder

    def __call__(self, context: Context) -> tuple[Plan, Path]:
        """The same for every node."""
        return self.plan, self.folder

    @cached_property
    def stored(self) -> Any:
        """Where Ray keeps the plan."""
        return ray.put(self.plan)

    def __reduce__(self) -> tuple[Any, ...]:
        return Borrowed, (self.stored, self.folder)


class Borrowed:
    """What becomes of `Shared` in a process of Ray's."""

    def __init__(self, stored: Any, folder: Path) -> None:
        self.stored = stored
        self.folder = folder

    def __call__(self, context: Context) -> tuple[Plan, Path]:
        """The same for every node."""
        return _fetched(self.stored), self.folder


@lru_cache(maxsize=1)
def _fetched(stored: Any) -> Plan:
    plan: Plan = ray.get(stored)
    return plan

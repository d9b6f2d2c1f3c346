"""Trains clients in Flower's simulation: Ray actors in place of worker processes."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from functools import cached_property, lru_cache
from pathlib import Path
from queue import Queue
from typing import Any

import ray
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from dynafed.engine.federation import Federation
from dynafed.errors import UserError, WorkerDied
from dynafed.flower.app_config import AppConfig
from dynafed.flower.apps import NodeSide, make_client_app
from dynafed.flower.backend import FlowerBackend
from dynafed.flower.environment import ray_address
from dynafed.flower.reaper import start_reaper

ROUND_TIMEOUT = 7 * 24 * 3600.0
"""Seconds for a round, however slow; the end of an actor or of Flower is noticed at once."""


class FlowerSimulation(FlowerBackend):
    """One simulated node for each client; `workers` actors take turns in running them.

    With the variable RAY_ADDRESS, they are actors of that Ray cluster, one for each of its CPUs. They may be on other
    machines, so the clients' states stay here, and travel with the messages.

    Flower calls the server app, and our rounds call their backend. So Flower runs in a thread, and its server app only
    passes the grid to us, then waits until the rounds are done.
    """

    holds_receipts = False
    tolerate_failures = False  # a simulated client that fails is an error, and the same bits can't come out without it

    def __init__(self, federation: Federation, path: Path) -> None:
        if federation.problem.device.type != "cpu":
            raise UserError(
                f"engine = 'flower' simulates on the CPU; device = '{federation.config.device}' needs engine = 'local'"
            )
        self.actors = federation.execution.workers
        super().__init__(federation, AppConfig(timeout=ROUND_TIMEOUT))
        self.grid_queue: Queue[Grid | None] = Queue()
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.reaper: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._simulate, name="flower", daemon=True)

    def __enter__(self) -> FlowerSimulation:
        super().__enter__()
        self.reaper = None if ray_address() else start_reaper()
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()
        if self.reaper is not None:
            self.reaper.communicate()
        super().__exit__(*error)

    @property
    def grid(self) -> Grid:
        """The connection to the nodes, as long as the simulation is alive."""
        if self._grid is None:
            self._grid = self.grid_queue.get()
        if self._grid is None or not self.thread.is_alive():
            raise WorkerDied(f"Flower's simulation ended: {self.error}")
        return self._grid

    def _simulate(self) -> None:
        server = ServerApp()

        @server.main()
        def pass_grid(grid: Grid, context: Context) -> None:
            self.grid_queue.put(grid)
            self.done.wait()

        shared = SharedFederation(self.federation)
        # Without an address, Ray joins any cluster that it finds on this machine, and refuses a number of CPUs for it.
        resources: dict[str, Any] = {} if ray_address() else {"address": "local", "num_cpus": self.actors}
        flower = logging.getLogger("flwr")
        level, pythonpath = flower.level, os.environ.get("PYTHONPATH")
        flower.setLevel(logging.ERROR)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            run_simulation(
                server,
                make_client_app(shared),
                num_supernodes=self.federation.config.clients,
                backend_config={
                    "init_args": {"logging_level": logging.ERROR, "log_to_driver": False, **resources},
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                },
            )
        except BaseException as error:
            self.error = error
        finally:
            self.grid_queue.put(None)
            flower.setLevel(level)
            if pythonpath is None:
                os.environ.pop("PYTHONPATH", None)  # Flower has set it for Ray's processes
            else:
                os.environ["PYTHONPATH"] = pythonpath


class SharedFederation:
    """Returns the federation to a client app. Ray's processes get it once, from Ray's store, not with every message."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation

    def __call__(self, context: Context, content: RecordDict) -> NodeSide:
        """The same for every node."""
        return NodeSide(self.federation, sends_states=True)

    @cached_property
    def object_ref(self) -> Any:
        """It, in Ray's object store."""
        return ray.put(self.federation)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredFederation, (self.object_ref,)


class StoredFederation:
    """A `SharedFederation` after unpickling in one of Ray's processes."""

    def __init__(self, object_ref: Any) -> None:
        self.object_ref = object_ref

    def __call__(self, context: Context, content: RecordDict) -> NodeSide:
        """The same for every node."""
        return NodeSide(_get_federation(self.object_ref), sends_states=True)


@lru_cache(maxsize=1)
def _get_federation(object_ref: Any) -> Federation:
    federation: Federation = ray.get(object_ref)
    return federation

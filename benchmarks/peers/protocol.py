"""How the harness and a side of the comparison talk: JSON lines over standard input and output.

The harness starts a side, tells it the task, and from then on asks for rounds, one or a few at a time, so that all
sides can be kept alive and take turns:

    harness: {"workload": {...}, "data": "folder", "options": {...}}
    side:    {"ready": {"parameters": 118282, "versions": {...}}}
    harness: {"rounds": 1}
    side:    {"seconds": [0.93], "steps": 768, "accuracies": [], "peak_mb": 41.0}
    harness: {"loss": true}
    side:    {"loss": 1.9}

The end of standard input ends the side. Nothing but Python and numpy is needed here: every peer's environment has both.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

PROX_MU, MOON_MU, MOON_TEMPERATURE = 0.01, 5.0, 0.5
"""Of FedProx and MOON, on every side."""
SAMPLES_FOR_LOSS = 1000
"""A side reports the mean loss of its global model on so many training samples."""


@dataclass(frozen=True)
class Workload:
    """One federated training job: all sides do exactly this."""

    name: str
    model: str
    """`mlp` with two hidden layers, `convnet` with three blocks and instance norm; and what a user may bring: `own`, an
    `nn.Sequential` of blocks with group norm and max pooling, or `resnet8`."""
    width: int
    shape: tuple[int, ...]
    clients: int
    per_round: int
    samples: int
    """Of each client; client i has rows i * samples up to (i + 1) * samples of the data."""
    classes: int = 10
    batch: int = 32
    lr: float = 1e-3
    optimizer: str = "adam"
    method: str = "fedavg"

    @property
    def steps(self) -> int:
        """Optimizer steps of one client in a round: one epoch."""
        return math.ceil(self.samples / self.batch)

    @property
    def share(self) -> float:
        """The share of the clients that takes part in a round."""
        return self.per_round / self.clients

    def rows(self, client: int) -> slice:
        """Where a client's samples are."""
        return slice(client * self.samples, (client + 1) * self.samples)

    def to_json(self) -> dict[str, Any]:
        """As the protocol sends it."""
        return asdict(self)


@dataclass(frozen=True)
class Task:
    """What a side is told first."""

    workload: Workload
    data: Path
    options: dict[str, Any]
    """What distinguishes the variants of one side, such as the number of threads."""

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Samples and labels, shared with the other sides through the page cache."""
        return np.load(self.data / "x.npy", mmap_mode="c"), np.load(self.data / "y.npy")

    def test_arrays(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The same of what is evaluated on after every round; None if nothing is."""
        if not (self.data / "test_x.npy").exists():
            return None
        return np.load(self.data / "test_x.npy"), np.load(self.data / "test_y.npy")


class Turns:
    """A side's end of the conversation.

    A side with a loop of its own calls `run(round)`. One that is called back by its framework calls `start` before the
    first round and `finished` after each: both return when the next round is wanted.
    """

    def __init__(self) -> None:
        # Whatever a framework prints must not get between the lines: it goes to the log.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._in = sys.stdin
        self.closing: Callable[[], Any] = sys.exit
        """Called when the harness wants no more."""
        self.loss: Callable[[], float] | None = None
        """The global model's present loss; measured when it is asked for, off the clock."""
        self.accuracy: Callable[[], float] | None = None
        """Its present accuracy, if every round is to be evaluated; that is a part of the round."""
        task = self._hear()
        workload = task["workload"] | {"shape": tuple(task["workload"]["shape"])}
        self.task = Task(Workload(**workload), Path(task["data"]), task["options"])

    def ready(self, parameters: int, *packages: str, **facts: Any) -> None:
        """Say that rounds can be asked for."""
        self._baseline = peak_mb()
        self._say({"ready": {"parameters": parameters, "versions": {name: version(name) for name in packages}} | facts})

    def start(self) -> None:
        """Wait until the first round is wanted."""
        self._wait()

    def finished(self, steps: int) -> None:
        """A round is done, with so many optimizer steps in all; wait until the next is wanted."""
        if self.accuracy:
            self._accuracies.append(self.accuracy())
        self._seconds.append(time.perf_counter() - self._began)
        self._steps += steps
        if len(self._seconds) < self._wanted:
            self._began = time.perf_counter()
            return
        peak = peak_mb() - self._baseline
        said = {"seconds": self._seconds, "steps": self._steps}
        self._say(said | {"accuracies": self._accuracies, "peak_mb": peak})
        self._wait()

    def run(self, one_round: Callable[[], int]) -> NoReturn:
        """Run rounds, which return how many optimizer steps they did, until the harness has enough."""
        self.start()
        while True:
            self.finished(one_round())

    def _wait(self) -> None:
        while "rounds" not in (heard := self._hear()):
            self._say({"loss": self.loss() if self.loss else None})
        self._wanted = heard["rounds"]
        self._seconds: list[float] = []
        self._accuracies: list[float] = []
        self._steps = 0
        self._began = time.perf_counter()

    def _hear(self) -> dict[str, Any]:
        line = self._in.readline()
        if not line:
            self.closing()
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _say(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._out, flush=True)


def peak_mb() -> float:
    """The most memory that this process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024

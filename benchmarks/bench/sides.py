"""Sides of a comparison as child processes that take turns."""

from __future__ import annotations

import json
import math
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from peers.protocol import Workload

from bench import environments, processes
from bench.places import HERE, LOGS

SETTLE = 300.0
"""Seconds that a side may go on computing in the background (compiling, say) before it is measured."""
CLEARED = ("OMP_", "MKL_", "GOMP_", "KMP_", "MALLOC_", "OPENBLAS_", "XLA_", "JAX_", "TORCH", "DYNAFED_")
"""Variables that would make the figures depend on who runs the benchmark; the sides start without them."""


@dataclass(frozen=True)
class Side:
    """One competitor in one variant."""

    name: str
    """The folder in `peers`."""
    variant: str
    options: Mapping[str, Any] = field(default_factory=dict)
    flavour: str = ""
    """Which of the peer's requirements it is to run with, where there are several."""
    most: int = 10**9
    """Turns at most: a side that takes minutes may have fewer than the others."""
    timeout: float = 1800.0
    warm_up: int = 0
    """Rounds that don't count, if not as many as the other sides'."""

    @property
    def label(self) -> str:
        """How tables call it."""
        return f"{self.name}, {self.variant}" if self.variant else self.name


class SideFailed(Exception):
    """A side can't be started or doesn't answer; says why."""


class Player:
    """A side that has been started; used as a context manager."""

    def __init__(self, side: Side, workload: Workload, data: Path, environment: Mapping[str, str]) -> None:
        self.side, self.workload = side, workload
        self.task = {"workload": workload.to_json(), "data": str(data), "options": dict(side.options)}
        self.environment = (
            {name: value for name, value in os.environ.items() if not name.startswith(CLEARED)}
            | {"PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent / "src")))}
            | ({"OMP_NUM_THREADS": str(side.options["threads"])} if "threads" in side.options else {})
            | environment
        )
        LOGS.mkdir(parents=True, exist_ok=True)
        self.log = LOGS / f"{workload.name}-{side.label}.log".replace(" ", "_").replace("/", "_")
        self.turns: list[float] = []
        self.cpu: list[float] = []
        self.started = self.first = math.nan
        self.settled = 0.0
        self.steps = self.rounds = 0
        self.last: dict[str, Any] = {}
        self.loss: float | None = None
        self.peak = self.before = math.nan

    def __enter__(self) -> Player:
        python = environments.python_of(self.side.name, self.side.flavour)
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [str(python), "-m", f"peers.{self.side.name}.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            env=self.environment,
            cwd=HERE,
            text=True,
        )
        try:
            self._say(self.task)
            self.facts: dict[str, Any] = self._hear()["ready"]
            self.started = time.perf_counter() - began
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        everyone = processes.family(self.process.pid)
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        processes.end(everyone)

    def warm_up(self, rounds: int = 2) -> None:
        """The first rounds don't count. Nor does what goes on in the background after them: wait for its end."""
        self.first = self.play(1)["seconds"][0]
        for _ in range(rounds - 1):
            self.play(1)
        self.settled = processes.wait_until_idle(self.process.pid, SETTLE)
        if self.settled > 2:
            self.play(1)

    def turn(self, memory: bool = False) -> None:
        """One round that counts."""
        if len(self.turns) >= self.side.most:
            return
        if memory:
            if math.isnan(self.before):
                self.before = processes.memory_mb(self.process.pid)
            with processes.Peak(self.process.pid) as peak:
                self._count()
            self.peak = max(peak.mb, -math.inf if math.isnan(self.peak) else self.peak)
        else:
            self._count()

    def _count(self) -> None:
        before = processes.cpu_seconds(self.process.pid)
        said = self.play(1)
        self.turns += said["seconds"]
        self.cpu.append(processes.cpu_seconds(self.process.pid) - before)

    def ask_loss(self) -> None:
        """What the model has come to."""
        self._say({"loss": True})
        self.loss = self._hear()["loss"]

    def result(self) -> dict[str, Any]:
        """Everything that was learned about this side."""
        best = min(self.turns)
        return {
            "side": self.side.label,
            "name": self.side.name,
            "job": self.workload.name,
            "variant": self.side.variant,
            "options": {key: value for key, value in self.side.options.items() if key != "save"},
            **self.facts,
            "best": best,
            "median": statistics.median(self.turns),
            "seconds": self.turns,
            "first": self.first,
            "settled_after": self.settled,
            "cpu_seconds": self.cpu,
            "cores": sum(self.cpu) / sum(self.turns),
            "steps": self.steps,
            "rounds": self.rounds,
            "loss": self.loss,
            "peak_mb": self.last.get("peak_mb"),
            "family_peak_mb": None if math.isnan(self.peak) else self.peak,
        }

    def play(self, rounds: int) -> dict[str, Any]:
        """So many rounds; returns what the side says of them."""
        self._say({"rounds": rounds})
        self.last = self._hear()
        self.steps += self.last["steps"]
        self.rounds += rounds
        return self.last

    def _say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin
        try:
            print(json.dumps(message), file=self.process.stdin, flush=True)
        except OSError:
            raise SideFailed(self._reason()) from None

    def _hear(self) -> dict[str, Any]:
        out: IO[str] | None = self.process.stdout
        assert out
        if not select.select([out], [], [], self.side.timeout)[0]:
            raise SideFailed(f"no answer within {self.side.timeout:.0f} s")
        if not (line := out.readline()):
            raise SideFailed(self._reason())
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _reason(self) -> str:
        """What a side that ended said last."""
        code = self.process.wait()
        said = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        said = [line.replace(str(HERE.parent), ".") for line in said]
        return f"ended with code {code}: {said[-1][:300] if said else 'it said nothing'}"


def interleave(
    sides: Sequence[tuple[Side, Workload, Path]],
    repeats: int,
    environment: Mapping[str, str],
    *,
    warm_up: int = 2,
    memory: bool = False,
    seconds: float = math.inf,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Start all sides, warm them up, then let them take turns: one round each, over and over.

    No turn is begun that would end after so many seconds, but for the first. Returns the results of those that went
    through, and the others with the reason why not.
    """
    began = time.perf_counter()
    playing: list[Player] = []
    absent: list[dict[str, str]] = []

    def attempt(player: Player, action: Callable[[], object]) -> bool:
        try:
            action()
        except (SideFailed, OSError, subprocess.CalledProcessError) as error:
            say(f"  {player.side.label}: {error}")
            who = {"side": player.side.label, "name": player.side.name, "job": player.workload.name}
            absent.append(who | {"reason": str(error)})
            return False
        return True

    def drop(player: Player) -> None:
        playing.remove(player)
        player.__exit__(None, None, None)

    try:
        for side, workload, data in sides:
            player = Player(side, workload, data, environment)
            if attempt(player, player.__enter__):
                playing.append(player)
                say(f"  {side.label}: warming up")
                if not attempt(player, lambda player=player: player.warm_up(player.side.warm_up or warm_up)):  # type: ignore[misc]
                    drop(player)
        for number in range(repeats):
            now = time.perf_counter()
            for player in list(playing):
                if not attempt(player, lambda player=player: player.turn(memory)):  # type: ignore[misc]
                    drop(player)
            say(f"  turn {number + 1} of {repeats}: " + ", ".join(f"{one.turns[-1]:.3f}" for one in playing))
            if 2 * time.perf_counter() - now - began > seconds:
                break
        for player in list(playing):
            if not attempt(player, player.ask_loss):
                drop(player)
        return [player.result() for player in playing], absent
    finally:
        for player in playing:
            player.__exit__(None, None, None)

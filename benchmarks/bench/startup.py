"""U: from the command to the first finished round of the demo."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import processes
from bench.sides import CLEARED

PATIENCE = 120.0


def measure(repeats: int, environment: dict[str, str]) -> dict[str, Any]:
    """The demo's first round, and beside it what importing torch alone takes; they take turns."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(CLEARED)} | environment
    first_rounds, imports = [], []
    for _ in range(repeats + 1):
        imports.append(import_torch(variables))
        first_rounds.append(first_round(variables))
        print(f"  first round {first_rounds[-1]:.2f} s, import torch {imports[-1]:.2f} s", file=sys.stderr, flush=True)
    return {
        "command": "dynafed run demo",
        "repeats": repeats,
        "first_time": first_rounds[0],
        "best": min(first_rounds[1:]),
        "median": statistics.median(first_rounds[1:]),
        "seconds": first_rounds[1:],
        "import_torch": min(imports[1:]),
        "over_import_torch": min(first_rounds[1:]) / min(imports[1:]),
    }


def import_torch(environment: dict[str, str]) -> float:
    """Seconds for Python to start and import torch."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=environment)
    return time.perf_counter() - began


def first_round(environment: dict[str, str]) -> float:
    """Seconds from the command to the first line of metrics.jsonl; then the run is interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "dynafed", "run", "demo", "--out", str(metrics.parent)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not (metrics.is_file() and metrics.stat().st_size):
                if process.poll() is not None or time.perf_counter() - began > PATIENCE:
                    raise RuntimeError("the demo did not finish a round")
                time.sleep(0.002)
            return time.perf_counter() - began
        finally:
            everyone = processes.family(process.pid)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            processes.end(everyone)

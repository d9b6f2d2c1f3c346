"""A side is often several processes: their CPU time, their memory, and their end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a family so far, with that of children that have ended."""
    return sum(sum(map(int, fields[11:15])) for one in family(pid) if (fields := _stat(one))) / TICKS


def memory_mb(pid: int) -> float:
    """The memory of a family now; what processes share is counted once."""
    total = 0
    for one in family(pid):
        with contextlib.suppress(OSError):
            total += int(re.findall(r"^Pss:\s+(\d+)", Path(f"/proc/{one}/smaps_rollup").read_text(), re.M)[0])
    return total / 1024


class Peak(threading.Thread):
    """Watches a family's memory; used as a context manager, `mb` is the most that was seen."""

    def __init__(self, pid: int, interval: float = 0.05) -> None:
        super().__init__(daemon=True)
        self.pid, self.interval = pid, interval
        self.mb = memory_mb(pid)
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(self.interval):
            self.mb = max(self.mb, memory_mb(self.pid))

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.join()


def wait_until_idle(pid: int, patience: float) -> float:
    """Wait while a family still computes on its own, in the background; returns the seconds waited."""
    began = time.perf_counter()
    while time.perf_counter() - began < patience:
        before = cpu_seconds(pid)
        time.sleep(0.5)
        if cpu_seconds(pid) - before < 0.1:
            break
    return time.perf_counter() - began


def end(pids: list[int], patience: float = 10) -> None:
    """End processes that should be ending already; after a while by force."""
    born = {pid: fields[19] for pid in pids if (fields := _stat(pid))}
    deadline = time.perf_counter() + patience
    while born and time.perf_counter() < deadline:
        time.sleep(0.05)
        # A number may have gone to somebody else: the time of birth tells.
        born = {pid: birth for pid, birth in born.items() if (now := _stat(pid)) and now[19] == birth and now[0] != "Z"}
    for pid in born:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []

"""Ends what is left of a simulation's Ray when the process that simulates is gone, killed for example.

Ray's daemons die with it, but the processes that they started notice it after a minute only. This file is run as a
program of its own, without any package: its argument is the number of the process, whose end closes its input.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

DAEMONS = ("raylet", "gcs_server")
"""What Ray starts in the process; all that these start, and what that starts, is Ray's."""

PERIOD = 0.5
"""Seconds between two looks at what they have started."""


def start_reaper() -> subprocess.Popen[bytes] | None:
    """Start it for this process; it ends when its input is closed. Elsewhere than on Linux there is none."""
    if sys.platform != "linux":
        return None
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    # Ctrl-C in a terminal reaches a whole group of processes: it has its own.
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def ray_processes(parent: int) -> dict[int, str]:
    """The processes of the Ray that `parent` has started: when each began, by number."""
    found: dict[int, tuple[int, str, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            head, _, tail = (folder / "stat").read_text("utf-8", "replace").rpartition(")")
            fields = tail.split()
            found[int(folder.name)] = int(fields[1]), fields[19], head.partition("(")[2]
    ray = {pid for pid, (above, _, name) in found.items() if above == parent and name in DAEMONS}
    while more := {pid for pid, (above, _, _) in found.items() if above in ray} - ray:
        ray |= more
    return {pid: found[pid][1] for pid in ray}


def _watch(parent: int) -> None:
    seen: dict[int, str] = {}
    while not select.select([sys.stdin], [], [], PERIOD)[0]:
        seen |= ray_processes(parent)
    for pid, began in seen.items():
        with suppress(OSError):  # it has ended, or the number is another's now
            if Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19] == began:
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _watch(int(sys.argv[1]))

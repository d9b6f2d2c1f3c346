"""What the figures were measured on, without anything that names the machine or its user."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Cores, processor, memory, versions, and how busy it was."""
    processor = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cores_there": os.cpu_count(),
        "cpu": processor[1] if processor else platform.machine(),
        "memory_gb": round(int(memory[1]) / 2**20, 1) if memory else None,
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "versions": {name: found for name in ("dynafed", "torch", "numpy") if (found := _version(name))},
        "load_before": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

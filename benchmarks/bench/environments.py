"""Each peer has a Python environment of its own, made from its pinned requirements when it is first wanted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.places import ENVIRONMENTS, HERE


def python_of(name: str, flavour: str = "") -> Path:
    """The interpreter for a side: ours, if it has no requirements of its own. There may be several flavours of them."""
    suffix = f"-{flavour}" if flavour else ""
    requirements = HERE / "peers" / name / f"requirements{suffix}.txt"
    if not requirements.is_file():
        return Path(sys.executable)
    folder = ENVIRONMENTS / f"{name}{suffix}"
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    if python.exists() and stamp.is_file() and stamp.read_text() == requirements.read_text():
        return python
    print(f"  making the environment of {folder.name}", file=sys.stderr, flush=True)
    if stamp.is_file():
        shutil.rmtree(folder)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # The list is complete. Without --no-deps, torchvision would bring another torch along.
    install = ["install", "--quiet", "--no-deps", "--requirement", requirements]
    quiet = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([python, "-m", "pip", *install], check=True, env=quiet, stdout=sys.stderr)
    shutil.copy(requirements, stamp)
    return python

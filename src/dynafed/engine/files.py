"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dynafed.errors import FolderBusy, UserError

try:
    import fcntl
except ImportError:  # Windows: nothing guards against a second process on the same folder
    fcntl = None  # type: ignore[assignment]

SAMPLES_NOW = "synthesis.png"
"""In a run's folder: the samples of a synthesis that is under way, as they are now; gone at its end."""


@contextmanager
def lock_folder(folder: Path, patience: float = 3.0, name: str = ".lock") -> Iterator[None]:
    """Refuse a folder that another process is writing to; one that is just ending gets a moment for it."""
    with (folder / name).open("w") as file:
        give_up = time.monotonic() + patience
        while fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > give_up:
                    raise FolderBusy(
                        f"{folder} is being written to by another process: wait for it, or end it"
                    ) from None
                time.sleep(0.05)
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine holds the folder's lock, without touching it; known only on Linux."""
    try:
        inode = str((folder / ".lock").stat().st_ino)
        held = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any(field.split(":")[-1] == inode for line in held for field in line.split() if field.count(":") == 2)


def make_folder(path: Path) -> Path:
    """The folder, made if need be; a clear word if it can't be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"can't make the folder {path}: {error.strerror}") from None
    return path


def write_bytes(path: Path, content: bytes) -> None:
    """Write aside, flush to disk, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def write_json(path: Path, value: Any) -> None:
    """A JSON file for people and programs."""
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def checksum(content: bytes) -> str:
    """What is compared to find out whether a file is still what was written."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def resume_command(path: Path) -> str:
    """What to type to continue the run in a folder."""
    return f"dynafed resume {shlex.quote(str(path))}"


def new_folder(name: str) -> Path:
    """Makes a folder in `runs/` that didn't exist, named after the moment and the work."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}".replace(":", "_").replace("/", "_")
    runs = make_folder(Path("runs"))
    for number in itertools.count(1):
        path = runs / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()  # of two processes that try, one succeeds
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")

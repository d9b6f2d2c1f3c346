"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


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

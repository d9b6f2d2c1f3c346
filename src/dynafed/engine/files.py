"""A run's files: whole or absent, whatever happens while they are written, and never reached through a link.

Everything that a run writes goes through `write_bytes` and `append_line`. What can't be written raises `CantWrite`, one
line, and leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dynafed.errors import CantWrite, FolderBusy, UserError

try:
    import fcntl
except ImportError:  # Windows: nothing guards against a second process on the same folder
    fcntl = None  # type: ignore[assignment]

SAMPLES_NOW = "synthesis.png"
"""In a run's folder: the samples of a synthesis that is under way, as they are now; gone at its end."""


@contextmanager
def lock_folder(folder: Path, patience: float = 3.0, name: str = ".lock") -> Iterator[None]:
    """Refuse a folder that another process is writing to; one that is just ending gets a moment for it.

    Refuse, too, a folder whose files lead outside it.
    """
    check_links(folder)
    with _writing(folder / name):
        descriptor = _open(folder / name, os.O_RDWR | os.O_CREAT)
    with os.fdopen(descriptor, "rb+") as file:
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
        if has_locks():
            _remove_leftovers(folder)
        yield


def has_locks() -> bool:
    """Whether `lock_folder` keeps others out on this system."""
    return fcntl is not None


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


SAMPLES = "samples"
"""In a run's folder: synthetic samples, a picture each."""

LINKLESS = ("checkpoint", "clients", "shared", SAMPLES)
"""Folders of a run in which everything is looked at; of the others only what lies in the run's folder itself."""

SUFFIXES = (".toml", ".json", ".jsonl", ".safetensors", ".html", ".lock")
"""Of the files that runs write and read; pictures are looked at where they are read."""


def check_links(folder: Path) -> None:
    """Refuse a run's folder in which a file or folder of a run is a link, a pipe or a device, or a file is a folder."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        own = [entry for entry in entries if entry.name in LINKLESS or entry.name.endswith(SUFFIXES)]
    for entry in own:
        _check_plain(entry)
        if entry.name in LINKLESS:
            _check_tree(Path(entry.path))


def _check_tree(folder: Path) -> None:
    """The same for everything below a folder."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            _check_plain(entry)
            if entry.is_dir():
                _check_tree(Path(entry.path))


def _check_plain(entry: os.DirEntry[str]) -> None:
    if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
        kind = "a link" if entry.is_symlink() else "neither a file nor a folder"
        raise UserError(f"{entry.path} is {kind}, and may lead outside the run's folder: delete it")
    if entry.name.endswith(SUFFIXES) and not entry.is_file(follow_symlinks=False):
        raise UserError(f"{entry.path} is a folder where a run has a file: delete it")


def _open(path: Path, flags: int) -> int:
    """A file's descriptor; not that of a link's target."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)


def _remove_leftovers(folder: Path) -> None:
    """Delete what a killed process had written aside; the folder's lock is ours, so nobody else is writing."""
    asides = [*folder.glob(".*"), *(folder / SAMPLES).glob(".*")]
    for aside in (path for path in asides if re.fullmatch(r"\..+\.\d+", path.name)):
        remove(aside)
    for aside in (folder / "checkpoint").glob(".round-*"):
        remove(aside)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn what the system refuses into one line."""
    try:
        yield
    except OSError as error:
        raise CantWrite(f"can't write {path}: {error.strerror or error}") from None


def write_bytes(path: Path, content: bytes) -> None:
    """Write aside, flush to disk, rename."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)
        try:
            with os.fdopen(_open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise


def write_folder(path: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder of files aside, then rename; whatever was in its place goes."""
    aside = path.with_name(f".{path.name}")
    with _writing(path):
        remove(aside)
        try:
            for name, content in contents.items():
                write_bytes(aside / name, content)
            remove(path)
            aside.replace(path)
        except BaseException:
            with suppress(OSError):
                remove(aside)
            raise


def append_line(path: Path, line: str) -> None:
    """Add a line to a file."""
    with _writing(path), os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
        file.write(line.encode() + b"\n")


def remove(path: Path) -> None:
    """Delete whatever is there: a file, a folder, a link but not its target, or nothing."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def write_json(path: Path, value: Any) -> None:
    """A JSON file for people and programs."""
    write_bytes(path, (json.dumps(strict(value), indent=1, allow_nan=False) + "\n").encode())


def strict(value: Any) -> Any:
    """The same as JSON can hold it: numbers that aren't finite are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: strict(each) for key, each in value.items()}
    return [strict(each) for each in value] if isinstance(value, list | tuple) else value


def to_line(record: Any) -> str:
    """A line of a JSON Lines file."""
    return json.dumps(strict(record), allow_nan=False)


def checksum(content: bytes) -> str:
    """What is compared to find out whether a file is still what was written."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


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

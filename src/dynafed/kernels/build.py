"""Our own kernels: compiled with the package, or once with the machine's C++ compiler and kept in the user's cache.

They are called by address.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynafed.config import cache_folder
from dynafed.engine.files import has_locks, lock_folder
from dynafed.errors import UserError
from dynafed.kernels import levels
from dynafed.stages import stage

log = logging.getLogger("dynafed")

FOLDER = Path(__file__).parent
TIMEOUT = 300
WORK, LEFTOVER_SECONDS = "compiling-", 3600.0
"""The folders in which it is compiled, and the age from which nobody can be at work in one that has no lock."""
WATCHED = ("sh", "-c", 'exec 3<&0; (read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 & exec "$@" 3<&- </dev/null', "sh")
"""What a command is started by, in a process group of its own: a child waits for the end of our pipe, which comes with
our own, and ends the group. A signal at a parent's death would reach the compiler only, not what it started."""
CPP = {torch.float32: "float", torch.float64: "double"}
"""What the kernels compute with."""


def lanes(dtype: torch.dtype) -> int:
    """The kernels take channels or units by so many."""
    return 64 // dtype.itemsize


def function(name: str) -> Any:
    """One of the kernels, for whoever has made sure that they are there."""
    kernels = library()
    assert kernels is not None
    return getattr(kernels, name)


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """A tensor as a kernel takes it, or that there is none."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels for this processor, or None where they aren't in the package nor can be compiled; that is said once.

    A library in the package and one that is compiled here come from the same sources by the same flags.
    """
    level, sources = levels.own_level(), levels.read_sources(FOLDER)
    prebuilt = FOLDER / levels.library_name(sources, level)
    if levels.is_whole(prebuilt) and all(_nobody_else_writes(path, root=True) for path in (prebuilt, FOLDER)):
        with suppress(OSError):  # for another C library, say
            return ctypes.CDLL(str(prebuilt))
    compiler = levels.find_compiler()
    if compiler is None:
        log.warning("no C++ compiler: networks run on torch's own kernels, which are slower")
        return None
    try:
        file = _compiled(compiler, level, sources)
        try:
            return ctypes.CDLL(str(file))
        except OSError:  # damaged
            file.unlink(missing_ok=True)
            return ctypes.CDLL(str(_compiled(compiler, level, sources)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        log.warning("our kernels don't compile here (%s): networks run on torch's own", said.partition("\n")[0])
        return None


def _compiled(compiler: str, level: str, sources: Mapping[str, bytes]) -> Path:
    """The library's file in the cache, made if it isn't there."""
    folder = cache_folder()
    target = folder / levels.library_name(sources, level, _run([compiler, "--version"]))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _nobody_else_writes(folder):
        raise PermissionError(f"others can write to {folder}")
    if not (levels.is_whole(target) and _nobody_else_writes(target)):
        _remove_leftovers(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=WORK) as work, lock_folder(Path(work)):
            made = Path(work) / "kernels.so"
            for name, source in sources.items():
                (Path(work) / name).write_bytes(source)
            stage("compiling our kernels")
            _run(levels.compile_command(compiler, level, made.name), work)
            levels.seal(made)
            made.chmod(0o700)
            made.replace(target)  # whoever else compiles it at this moment makes the same
    return target


def _run(command: list[str], folder: str | None = None) -> str:
    """What a compiler prints; if it takes too long or we are stopped or killed, it ends with all that it started."""
    groups = hasattr(os, "killpg")
    watched = [*WATCHED, *command] if groups else command
    reading, writing = os.pipe()
    with (
        open(reading, "rb") as ours,
        open(writing, "wb"),
        subprocess.Popen(
            watched,
            cwd=folder,
            stdin=ours,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except BaseException:
            if groups:
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return out


def _remove_leftovers(folder: Path) -> None:
    """Delete what compilations left that were killed: whoever is at work in a folder has its lock."""
    for work in folder.glob(f"{WORK}*"):
        with suppress(UserError, OSError):
            old = time.time() - work.stat().st_mtime > LEFTOVER_SECONDS
            if old or (has_locks() and (work / ".lock").exists()):
                with lock_folder(work, patience=0):
                    shutil.rmtree(work, ignore_errors=True)


def _nobody_else_writes(path: Path, root: bool = False) -> bool:
    """Whether what lies there can only be our own, or `root`'s if that will do: it will be run."""
    if not hasattr(os, "getuid"):
        return True
    found = path.stat()
    return found.st_uid in (os.getuid(), *([0] if root else [])) and not found.st_mode & 0o022

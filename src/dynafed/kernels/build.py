"""Our own kernels: compiled once with the machine's C++ compiler, kept in the user's cache, called by address."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynafed.config import cache_folder, compiler_name
from dynafed.engine.files import has_locks, lock_folder
from dynafed.errors import UserError
from dynafed.stages import stage

log = logging.getLogger("dynafed")

SOURCES = ("blocks.h", "convnet.cpp", "mlp.cpp", "network.cpp", "norm.cpp", "winograd.cpp")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
TIMEOUT = 300
DIGEST_SIZE = 16
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
    """The compiled kernels, or None where there is no compiler or it fails; that is said once."""
    compiler = shutil.which(compiler_name()) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        log.warning("no C++ compiler: networks run on torch's own kernels, which are slower")
        return None
    try:
        file = _compiled(compiler)
        try:
            return ctypes.CDLL(str(file))
        except OSError:  # damaged
            file.unlink(missing_ok=True)
            return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        log.warning("our kernels don't compile here (%s): networks run on torch's own", said.partition("\n")[0])
        return None


def _compiled(compiler: str) -> Path:
    """The library's file, made if it isn't there; its name tells source, compiler and processor."""
    files = resources.files(__package__)
    sources = {name: files.joinpath(name).read_bytes() for name in SOURCES}
    version = _run([compiler, "--version"])
    key = hashlib.blake2b(
        b"\0".join((*sources.values(), version.encode(), _processor().encode(), *map(str.encode, FLAGS))),
        digest_size=12,
    )
    folder = cache_folder()
    target = folder / f"kernels-{key.hexdigest()}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _nobody_else_writes(folder):
        raise PermissionError(f"others can write to {folder}")
    if not (_is_whole(target) and _nobody_else_writes(target)):
        _remove_leftovers(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=WORK) as work, lock_folder(Path(work)):
            made = Path(work) / "kernels.so"
            for name, source in sources.items():
                (Path(work) / name).write_bytes(source)
            stage("compiling our kernels")
            command = [compiler, *FLAGS, "-o", made.name, *(name for name in sources if name.endswith(".cpp"))]
            _run(command, work)
            with made.open("ab") as file:
                file.write(_checksum(made.read_bytes()))
            made.chmod(0o700)
            made.replace(target)  # whoever else compiles it at this moment makes the same
    return target


def _is_whole(library: Path) -> bool:
    """Whether it is what was compiled: a library that was cut off ends the process that loads it."""
    if not library.exists():
        return False
    content = library.read_bytes()
    return content[-DIGEST_SIZE:] == _checksum(content[:-DIGEST_SIZE])


def _checksum(content: bytes) -> bytes:
    """What stands behind the library in its file, where no loader looks."""
    return hashlib.blake2b(content, digest_size=DIGEST_SIZE).digest()


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


def _nobody_else_writes(path: Path) -> bool:
    """Whether what lies there can only be our own: it will be run."""
    found = path.stat()
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))

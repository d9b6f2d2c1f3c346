"""What our kernels are compiled from, and for which processors.

The package's build reads this file, too, so it needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

HEADERS = ("activations.h", "blocks.h", "vectors.h")
SOURCES = (*HEADERS, "convnet.cpp", "mlp.cpp", "network.cpp", "norm.cpp", "winograd.cpp")
FLAGS = ("-O3", "-fno-math-errno", "-shared", "-fPIC")
"""And the level. They are the same wherever a library is made, so that all of one level give the same bits."""
BASES = {"x86_64": "x86-64", "aarch64": "armv8-a"}
"""What every processor of a machine's kind can do, as compilers name it."""
ABOVE = {
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
    "x86-64-v3": "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave",
}
"""Levels above that, each with what it needs in /proc/cpuinfo beside what those below it need; the highest first."""
ANY = "any"
"""The level of other machines, which no compiler knows: what it takes by default."""
DIGEST_SIZE = 16


def machine() -> str:
    """The kind of this machine; every system has names of its own for it."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def prebuilt_levels() -> tuple[str, ...]:
    """The levels that are compiled when the package is built on a machine of this kind."""
    return tuple(ABOVE) if machine() == "x86_64" else ("armv8-a",) if machine() == "aarch64" else ()


def own_level() -> str:
    """The level of this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    has = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    for number, level in enumerate(ABOVE):
        if all(has.issuperset(needed.split()) for needed in list(ABOVE.values())[number:]):
            return level
    return BASES.get(machine(), ANY)


def read_sources(folder: Path) -> dict[str, bytes]:
    """Each source by its name."""
    return {name: (folder / name).read_bytes() for name in SOURCES}


def library_name(sources: Mapping[str, bytes], level: str, made_by: str = "") -> str:
    """The file's name; it tells sources, flags and level, and who made it if that isn't the package's build."""
    content = b"\0".join((*sources.values(), *map(str.encode, (level, *FLAGS, made_by))))
    return f"kernels-{level}-{hashlib.blake2b(content, digest_size=12).hexdigest()}.so"


def find_compiler() -> str | None:
    """The one that CXX names, if it is there, else another; None if there is none."""
    names = os.environ.get("CXX", "c++"), "g++", "clang++"
    return next(filter(None, map(shutil.which, names)), None)


def compile_command(compiler: str, level: str, output: str) -> list[str]:
    """What compiles the sources of the folder that it is run in."""
    units = [name for name in SOURCES if name.endswith(".cpp")]
    return [compiler, *FLAGS, *([] if level == ANY else [f"-march={level}"]), "-o", output, *units]


def seal(library: Path) -> None:
    """Append its checksum, where no loader looks."""
    with library.open("ab") as file:
        file.write(_checksum(library.read_bytes()))


def is_whole(library: Path) -> bool:
    """Whether it is what was compiled: a library that was cut off ends the process that loads it."""
    if not library.exists():
        return False
    content = library.read_bytes()
    return content[-DIGEST_SIZE:] == _checksum(content[:-DIGEST_SIZE])


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_SIZE).digest()

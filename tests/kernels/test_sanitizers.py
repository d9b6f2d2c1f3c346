"""Our kernels under the address and undefined-behaviour sanitizers, where the compiler has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynafed.kernels import levels

HERE = Path(__file__).parent


def sanitizer() -> str:
    """The library that must be loaded first; empty if there is none."""
    compiler = levels.find_compiler()
    if compiler is None or sys.platform != "linux":
        return ""
    said = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    found = Path(said.stdout.strip())
    return str(found.resolve()) if found.is_absolute() and found.exists() else ""


@pytest.mark.skipif(not sanitizer(), reason="the compiler has no sanitizers")
def test_no_shape_makes_the_kernels_read_or_write_elsewhere(tmp_path: Path) -> None:
    environment = os.environ | {
        "LD_PRELOAD": sanitizer(),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "DYNAFED_CACHE": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, str(HERE / "sanitized.py")]
    run = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert run.stdout.split() == ["clean", "seen"], run.stderr[-3000:]
    assert "AddressSanitizer" in run.stderr

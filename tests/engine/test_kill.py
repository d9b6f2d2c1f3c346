"""kill -9 at random moments, in a real child process, until the run is done: the same bits, and nobody left behind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from problems import run_tiny

from dynafed import tree

CHILD = """
import sys, pathlib
sys.path[:0] = [{tests!r}]
from problems import TEST, TRAIN, tiny
import dynafed
path = pathlib.Path({path!r})
changes = dict(rounds=18, client_state="persistent", client_memory_mb=0, workers=2, checkpoint_every=3)
if (path / "config.toml").exists():
    dynafed.resume(path, train=TRAIN, test=TEST)
else:
    dynafed.run(tiny(**changes), train=TRAIN, test=TEST, out=path)
"""


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks at process groups")
def test_killed_at_random_moments_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = run_tiny(tmp_path / "whole", rounds=18, client_state="persistent", checkpoint_every=3)
    path = tmp_path / "killed"
    script = CHILD.format(tests=str(Path(__file__).parents[1]), path=str(path))
    rng = random.Random(0)
    killed = 0
    for _ in range(40):
        before = _rounds(path)
        child = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stderr=subprocess.PIPE)
        # Let it get past its imports, then strike somewhere in the next few rounds.
        patience = time.monotonic() + 60
        while child.poll() is None and _rounds(path) <= before and time.monotonic() < patience:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.15)
        if child.poll() is None:
            child.kill()
            killed += 1
        child.wait()
        assert child.stderr is not None
        errors = child.stderr.read().decode()
        assert "Traceback" not in errors, errors
        patience = time.monotonic() + 20
        while alive(child.pid) and time.monotonic() < patience:
            time.sleep(0.01)
        assert not alive(child.pid), "a worker outlived its parent"
        if child.returncode == 0:
            break
    assert child.returncode == 0
    assert killed >= 2
    ended = (path / "checkpoint" / "round-000018" / "state.safetensors").read_bytes()
    model = tree.unnest(tree.unpack(ended))["model"]
    assert tree.digest(model) == tree.digest(whole.state.model)


def _rounds(path: Path) -> int:
    file = path / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0

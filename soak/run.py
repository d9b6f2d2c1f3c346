"""Random faults, as many as one likes: mutated updates, damaged folders, kills, many rounds. `make soak` runs a few.

    python soak/run.py --updates 100000 --folders 2000 --kills 1000 --rounds 2000

Exits with 1 at the first fault that gets through, and says the seed that shows it again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from problems import TEST, TRAIN, run_tiny, tiny

import dynafed
from dynafed import RunFailed, UserError, tree
from dynafed.engine.federation import Federation
from dynafed.engine.server import server_broadcast, server_update
from dynafed.messages import Update
from dynafed.tree import Tree

DATA: dict[str, Any] = {"train": TRAIN, "test": TEST}
METHODS = ("fedavg", "scaffold", "fedadam", "feddyn", "fednova", "median")


def mutated_updates(count: int, rng: random.Random, folder: Path) -> Counter[str]:
    """Whatever one client sends beside three honest ones, the model and the server's state stay finite and small."""
    outcomes: Counter[str] = Counter()
    for method in METHODS:
        federation = Federation.create(tiny(method=method, optimizer="sgd"), **DATA)
        side, model = federation.server_side, federation.problem.initial_model()
        server = {step.name: step.init_server(federation.problem, model) for step in side.methods.steps}
        sent, extras, norms = server_broadcast(side, 1, model, server), side.methods.extras_spec(federation.problem), {}
        honest = [Update(c, {n: t + 0.01 for n, t in model.items()}, 9, 1, 0.5, 0.0, extras) for c in range(3)]
        norms = server_update(side, sent, server, honest).norms
        for _ in range(count // len(METHODS)):
            outcome = server_update(side, sent, server, [*honest, _mutate(honest[0], rng)], norms=norms)
            assert tree.max_abs(outcome.model) < 1e3, method
            assert tree.max_abs(tree.nest(outcome.server)) < 1e6, method
            outcomes["rejected" if outcome.rejected else "accepted"] += 1
    return outcomes


def _mutate(update: Update, rng: random.Random) -> Update:
    model, name = dict(update.model), rng.choice([*update.model])
    tensor = model[name]
    changes: list[Callable[[], Any]] = [
        lambda: torch.full_like(tensor, rng.choice([float("nan"), float("inf"), 3.4e38, -1e30, 1e12])),
        lambda: tensor.double(),
        lambda: tensor.to(torch.complex64),
        lambda: tensor.reshape(-1)[:-1],
        lambda: torch.zeros(0),
        lambda: tensor * 10 ** rng.uniform(-30, 30),
    ]
    kind = rng.randrange(len(changes) + 4)
    if kind < len(changes):
        model[name] = changes[kind]()
    elif kind == len(changes):
        del model[name]
    elif kind == len(changes) + 1:
        model["evil"] = tensor
    made: dict[str, Any] = {"examples": rng.choice([0, -5, 2**62]) if kind == len(changes) + 2 else update.examples}
    if kind == len(changes) + 3 and update.extras:
        made["extras"] = {k: {n: torch.full_like(t, 3e38) for n, t in v.items()} for k, v in update.extras.items()}
    return replace(update, client=3, model=model, **made)


def damaged_folders(count: int, rng: random.Random, folder: Path) -> Counter[str]:
    """A folder with a damaged file is refused in one line, or the run ends with the bits that it has without damage."""
    outcomes: Counter[str] = Counter()
    run_tiny(folder / "part", method="scaffold", rounds=4)
    whole = tree.digest(run_tiny(folder / "whole", method="scaffold", rounds=6).state.model)
    for number in range(count):
        path = folder / f"damaged-{number}"
        shutil.copytree(folder / "part", path)
        victim = rng.choice(sorted(file for file in path.rglob("*") if file.is_file()))
        content = bytearray(victim.read_bytes())
        kind = rng.choice(["flip", "cut", "delete", "empty", "noise"])
        if kind == "delete":
            victim.unlink()
        else:
            if kind == "flip" and content:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            cut = {"cut": content[: rng.randrange(len(content) + 1)], "empty": b"", "noise": rng.randbytes(99)}
            victim.write_bytes(cut.get(kind, content))
        try:
            result = dynafed.resume(path, changes={"rounds": 6}, **DATA)
        except (UserError, RunFailed) as error:
            outcomes["refused" if "\n" not in str(error) else "refused in several lines"] += 1
        else:
            assert tree.digest(result.state.model) == whole, (victim, kind)
            outcomes["same bits"] += 1
        shutil.rmtree(path)
    return outcomes


def kills(count: int, rng: random.Random, folder: Path) -> Counter[str]:
    """A run that is killed at any time is resumed and ends with the same bits."""
    outcomes: Counter[str] = Counter()
    settings = ["-smethod=scaffold", "-srounds=12", "-scheckpoint_every=1", "-sworkers=2", "-smlp.width=8"]
    command = [sys.executable, "-m", "dynafed", "run", "demo", *settings, "--out"]
    began = time.monotonic()
    subprocess.run([*command, str(folder / "whole")], check=True, capture_output=True)
    length = time.monotonic() - began
    expected = _final_model(folder / "whole")
    for number in range(count):
        path, sent = folder / f"killed-{number}", rng.choice(["SIGKILL", "SIGTERM", "SIGHUP", "SIGINT"])
        with subprocess.Popen([*command, str(path)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            time.sleep(rng.uniform(0, length))
            process.send_signal(getattr(signal, sent))
            process.wait(120)
        again = ["resume", str(path)] if (path / "config.toml").exists() else [*command[3:], str(path)]
        subprocess.run([sys.executable, "-m", "dynafed", *again], check=True, capture_output=True)
        assert _final_model(path) == expected, path
        outcomes[sent] += 1
        shutil.rmtree(path)
    return outcomes


def _final_model(path: Path) -> str:
    (newest,) = sorted((path / "checkpoint").glob("round-*"))[-1:]
    parts: Tree = tree.unpack((newest / "state.safetensors").read_bytes())
    return tree.digest(parts)


def many_rounds(count: int, rng: random.Random, folder: Path) -> Counter[str]:
    """Memory and descriptors stay flat."""
    seen: list[tuple[int, int]] = []

    def measure(record: Any) -> None:
        seen.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(os.listdir("/proc/self/fd"))))

    config = tiny(method="scaffold", rounds=count, eval_every=count, checkpoint_every=10)
    dynafed.run(config, **DATA, out=folder / "long", callbacks=[measure])
    middle, last = seen[len(seen) // 2], seen[-1]
    assert last[1] <= middle[1] + 2, "descriptors grow"
    assert last[0] <= 1.1 * middle[0], "memory grows"
    return Counter({"rounds": count, "MB": last[0] // 1024, "descriptors": last[1]})


PARTS = {"updates": mutated_updates, "folders": damaged_folders, "kills": kills, "rounds": many_rounds}


def main() -> None:
    """Run the parts that have a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in zip(PARTS, (2000, 40, 5, 100), strict=True):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, part in PARTS.items():
        if size := getattr(args, name):
            with tempfile.TemporaryDirectory() as folder:
                outcomes = part(size, random.Random(f"{args.seed}/{name}"), Path(folder))
            print(json.dumps({name: size, "seed": args.seed, "outcomes": dict(outcomes)}), flush=True)


if __name__ == "__main__":
    main()

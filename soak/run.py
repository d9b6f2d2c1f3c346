"""Random faults, as many as one likes: nothing may get through. `make soak` runs a few.

    python soak/run.py --updates 100000 --folders 2000 --kills 1000 --flower-kills 20 --disk 100000 --rounds 2000 \
        --fuzz 10000

Each part has a size; 0 leaves it out. What it did is a line of JSON. Exits with 1 at the first fault that gets through,
and says with which seed it is seen again.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: processes are forked here
TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "contract")]

import torch
from cases import config as case_config
from faults import Faults
from fuzzing import TARGETS, check
from problems import TEST, TRAIN, tiny

import dynafed
from dynafed import Config, RunFailed, UserError, tree
from dynafed.engine.federation import Federation
from dynafed.engine.server import server_broadcast, server_update
from dynafed.flower.reaper import ray_processes
from dynafed.messages import Update
from dynafed.tree import Tree

DATA: dict[str, Any] = {"train": TRAIN, "test": TEST}
NAN, INF = float("nan"), float("inf")

ATTACKED = (
    *("fedavg", "scaffold", "fedadam", "feddyn", "fednova", "median", "fedgen", "fedavgm", "dynafed", "abavg", "krum"),
    *("scaffold+geometric-median", "feddyn+fedyogi"),
)
KILLED = (
    "fedavg",
    "scaffold",
    "dynafed",
    "fedgen",
    "feddyn",
    "dynafed+average",
    "scaffold+fedadam",
    "moon+krum+fedavgm",
)
SIGNALS = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT")

# Updates


def mutated_updates(count: int, rng: random.Random, folder: Path) -> Counter[str]:
    """Whatever one client sends beside three honest ones, the model and the server's state stay finite and small."""
    outcomes: Counter[str] = Counter()
    for number, method in enumerate(ATTACKED):
        weighting = "examples" if number % 2 and method in ("fedadam", "fednova", "fedavgm", "scaffold") else "uniform"
        federation = Federation.create(case_config(method, weighting=weighting), **DATA)
        side, model = federation.server_side, federation.problem.initial_model()
        server = {step.name: step.init_server(federation.problem, model) for step in side.methods.steps}
        sent, extras = server_broadcast(side, 1, model, server), side.methods.extras_spec(federation.problem)
        sizes = [len(federation.client(client).y) for client in range(4)]
        moved = {n: t + 0.01 for n, t in model.items()}
        honest = [Update(client, moved, size, -(-size // 16), 0.5, 0.0, extras) for client, size in enumerate(sizes)]
        norms = server_update(side, sent, server, honest).norms
        for _ in range(-(-count // len(ATTACKED))):
            sent_up = _mutate(honest[3], rng)
            outcome = server_update(side, sent, server, [*honest[:3], sent_up], norms=norms)
            for part, most in ((outcome.model, 1e3), (tree.nest(outcome.server), 1e6)):
                size = tree.norm(part)
                if not size < most:
                    raise AssertionError(f"{method}: norm {size} after {sent_up}")
            if outcome.accepted[:3] != [0, 1, 2] and method != "krum":
                raise AssertionError(f"{method}: honest clients don't count after {sent_up}: {outcome.rejected}")
            json.dumps(outcome.rejected)
            outcomes["rejected" if outcome.rejected else "accepted"] += 1
    return outcomes


def _mutate(update: Update, rng: random.Random) -> Update:
    """One update with one thing in it that is odd; sometimes several."""
    model, extras = dict(update.model), {name: dict(extra) for name, extra in update.extras.items()}
    made: dict[str, Any] = {}
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        part: Tree = rng.choice([model, model, *extras.values()])
        match rng.choice(["tensor"] * 6 + ["missing", "more", "claim"] + ["section"] * bool(extras)):
            case "tensor" if part:
                name = rng.choice(sorted(part))
                part[name] = _odd_tensor(part[name], rng)
            case "missing" if part:
                del part[rng.choice(sorted(part))]
            case "more":
                part[rng.choice(["evil", "a/b", "", "\x1b[2J\n"])] = torch.ones(2)
            case "section":
                extras.pop(rng.choice(sorted(extras)), None)
                extras[rng.choice(["evil", "scaffold", "fedgen"])] = {"x": torch.ones(1)}
            case "claim":
                made |= rng.choice(
                    [
                        {"examples": rng.choice([0, -5, 1, 2**62, 10**9])},
                        {"steps": rng.choice([0, -5, 10**6, 2**62])},
                        {"loss": rng.choice([NAN, INF, -INF, 1e308])},
                        {"curve": (NAN, 1e308)},
                    ]
                )
    return replace(update, model=model, extras=extras, **made)


def _odd_tensor(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    makers: list[Callable[[], torch.Tensor]] = [
        lambda: torch.full_like(tensor.double(), rng.choice([3.4e38, -1e30, 1e12, 2.0**62])).to(tensor.dtype),
        lambda: torch.full_like(tensor.double(), rng.choice([NAN, INF, -INF])).to(tensor.dtype),
        lambda: tensor.double(),
        lambda: tensor.to(torch.complex64),
        lambda: tensor.half(),
        lambda: tensor.reshape(-1)[:-1],
        lambda: tensor[None],
        lambda: torch.zeros(0),
        lambda: (tensor * 10 ** rng.uniform(-30, 30)).to(tensor.dtype),
        lambda: -tensor,
        lambda: tensor + (torch.randn(tensor.shape) * 10 ** rng.uniform(-5, 10)).to(tensor.dtype),
        lambda: (
            tensor.expand(2, *tensor.shape)[0].t() if tensor.ndim == 2 else tensor.flip(0) if tensor.ndim else tensor
        ),
    ]
    return rng.choice(makers)()


# Folders


def damaged_folders(count: int, rng: random.Random, folder: Path) -> Counter[str]:
    """A folder with a damaged file is refused in one line, or the run ends with the bits that it has without damage."""
    outcomes: Counter[str] = Counter()
    runs = {}
    for method in ("scaffold", "fedavg+dynafed"):
        config = case_config(method, rounds=4)
        dynafed.run(config, **DATA, out=folder / method)
        whole = dynafed.run(config.replace(rounds=6), **DATA, out=folder / f"{method} whole")
        runs[method] = tree.digest(whole.state.model)
    for number in range(count):
        method = rng.choice(sorted(runs))
        path = folder / f"damaged-{number}"
        shutil.copytree(folder / method, path)
        victim = rng.choice(sorted(file for file in path.rglob("*") if file.is_file()))
        kind = rng.choice(["flip", "cut", "delete", "empty", "noise", "link", "folder"])
        _damage(victim, kind, rng)
        try:
            result = dynafed.resume(path, changes={"rounds": 6}, **DATA)
        except (UserError, RunFailed) as error:
            if "\n" in str(error):
                raise AssertionError(f"{victim}, {kind}: several lines") from error
            outcomes["refused"] += 1
        else:
            assert tree.digest(result.state.model) == runs[method], (victim, kind)
            outcomes["same bits"] += 1
        shutil.rmtree(path)
    return outcomes


def _damage(victim: Path, kind: str, rng: random.Random) -> None:
    content = bytearray(victim.read_bytes())
    if kind in ("delete", "link", "folder"):
        victim.unlink()
        if kind == "link":
            victim.symlink_to(rng.choice(["/nowhere", __file__]))
        elif kind == "folder":
            victim.mkdir()
        return
    if kind == "flip" and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    cut = {"cut": content[: rng.randrange(len(content) + 1)], "empty": b"", "noise": rng.randbytes(99)}
    victim.write_bytes(cut.get(kind, content))


# Kills


def kills(count: int, rng: random.Random, folder: Path) -> Counter[str]:
    """A run that is killed at any time, again and again, ends with the same bits, and nobody is left behind."""
    outcomes: Counter[str] = Counter()
    wholes: dict[str, tuple[str, float]] = {}
    while outcomes["kills"] < count:
        method, path = rng.choice(KILLED), folder / f"killed-{outcomes['runs']}"
        changes: dict[str, Any] = {"rounds": 12, "checkpoint_every": rng.choice([1, 3]), "workers": rng.choice([1, 2])}
        config = case_config(method, **changes, client_memory_mb=rng.choice([0, 1024]))
        if method not in wholes:
            began = time.monotonic()
            child = _forked(config, folder / method)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, _said(folder / method)
            wholes[method] = _final_model(folder / method), time.monotonic() - began
        expected, length = wholes[method]
        while True:
            child = _forked(config, path)
            sent = rng.choice(SIGNALS)
            time.sleep(rng.uniform(0, length))
            os.kill(child, getattr(signal, sent))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert "Traceback" not in _said(path), (path, sent, _said(path))
            _wait_for_group(child)
            outcomes["kills"] += code != 0
            outcomes[sent] += code != 0
            if code == 0:
                break
            assert code in (130, -signal.SIGKILL, -getattr(signal, sent)), (sent, code, _said(path))
        assert _final_model(path) == expected, (path, method, config)
        leftovers = [file for file in path.rglob(".*") if file.name not in (".lock", ".said")]
        assert not leftovers, leftovers
        outcomes["runs"] += 1
        shutil.rmtree(path)
    return outcomes


def _forked(config: Config, path: Path) -> int:
    """The number of a process that runs or resumes `config` in `path`; torch is imported once, here."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so would a run
        path.mkdir(parents=True, exist_ok=True)
        with (path / ".said").open("w") as said:
            os.dup2(said.fileno(), 2)
        try:
            if (path / "config.toml").exists():
                dynafed.resume(path, changes={"workers": config.workers}, **DATA)
            else:
                dynafed.run(config, **DATA, out=path)
            code = 0
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
    finally:
        os._exit(code)


def _said(path: Path) -> str:
    return (path / ".said").read_text() if (path / ".said").exists() else ""


def _wait_for_group(group: int, patience: float = 60.0) -> None:
    """Return once no process of the group is left."""
    give_up = time.monotonic() + patience
    while time.monotonic() < give_up:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError("a process outlived the run")


def _final_model(path: Path) -> str:
    (newest,) = sorted((path / "checkpoint").glob("round-*"))[-1:]
    parts: Tree = tree.unpack((newest / "state.safetensors").read_bytes())
    return tree.digest({name: tensor for name, tensor in parts.items() if not name.startswith("norms/")})


def flower_kills(count: int, rng: random.Random, folder: Path) -> Counter[str]:
    """The same on Flower's simulation: the bits of a local run, and no process of Ray is left behind."""
    outcomes: Counter[str] = Counter()
    for number in range(count):
        method, sent = KILLED[number % 6], rng.choice(SIGNALS)
        changes = {"rounds": 8, "checkpoint_every": 1, "dataset": "digits"}
        source, path = folder / f"{number}.toml", folder / f"flower-{number}"
        source.write_text(case_config(method, **changes).to_toml())
        command = [sys.executable, "-m", "dynafed"]
        subprocess.run([*command, "run", source, "--out", folder / f"local-{number}"], check=True, capture_output=True)
        flower = [*command, "run", source, "--engine", "flower", "--workers", "1", "--out", path]
        with subprocess.Popen(flower, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not (path / "metrics.jsonl").exists():
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 1))
            ray = ray_processes(process.pid)
            process.send_signal(getattr(signal, sent))
            outcomes[sent] += process.wait() != 0
        give_up = time.monotonic() + 60
        while left := [pid for pid in ray if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < give_up, f"{len(left)} processes of Ray are left"
            time.sleep(0.1)
        subprocess.run([*command, "resume", path, "--engine", "flower"], check=True, capture_output=True)
        assert _final_model(path) == _final_model(folder / f"local-{number}"), method
        outcomes["same bits"] += 1
    return outcomes


# Disk


def full_disk(count: int, rng: random.Random, folder: Path) -> Counter[str]:
    """At every write of a run the disk is full, read-only or broken: one line, and then the same bits.

    At most `count` writes are tried, evenly chosen.
    """
    outcomes: Counter[str] = Counter()
    for method in ("scaffold", "dynafed"):
        config = case_config(method, rounds=4, checkpoint_every=1, client_memory_mb=0)
        whole = tree.digest(dynafed.run(config, **DATA, out=folder / method).state.model)
        writes = _failing(config, folder / f"{method} counted", -1, errno.ENOSPC, False)[0]
        for number in sorted({int(at) for at in torch.linspace(0, writes - 1, min(count // 2 + 1, writes)).tolist()}):
            path, code = folder / f"full-{number}", rng.choice([errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
            once = rng.random() < 0.3
            error = _failing(config, path, number, code, once)[1]
            assert error is None or (os.strerror(code) in str(error) and "\n" not in str(error)), (number, error)
            assert error is not None or once, (number, "was not noticed")
            left = [file for file in path.rglob(".*") if file.is_file() and file.name != ".lock"]
            assert not left, (number, left)
            if (path / "config.toml").exists():
                result = dynafed.resume(path, **DATA)
            else:
                result = dynafed.run(config, **DATA, out=path)
            assert tree.digest(result.state.model) == whole, (method, number)
            outcomes[errno.errorcode[code]] += 1
            shutil.rmtree(path)
    return outcomes


def _failing(config: Config, path: Path, number: int, code: int, once: bool) -> tuple[int, Exception | None]:
    """How many writes a run makes of which number `number` fails, and what it raised."""
    before: list[tuple[Any, str, Any]] = []

    def put(place: Any, name: str, value: Any) -> None:
        before.append((place, name, getattr(place, name)))
        setattr(place, name, value)

    faults, raised = Faults(put, path, code, once), None
    faults.left = number
    try:
        dynafed.run(config, **DATA, out=path)
    except (UserError, RunFailed) as error:
        raised = error
    finally:
        for place, name, value in before:
            setattr(place, name, value)
    return faults.done, raised


# Rounds


def many_rounds(count: int, rng: random.Random, folder: Path) -> Counter[str]:
    """Memory, descriptors and the processor's time for a round stay flat."""
    seen: list[tuple[int, int, float]] = []

    def measure(record: Any) -> None:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seen.append((memory, len(os.listdir("/proc/self/fd")), time.process_time()))

    config = tiny(method="scaffold", rounds=count, eval_every=count, checkpoint_every=10)
    dynafed.run(config, **DATA, out=folder / "long", callbacks=[measure])
    middle, last = seen[len(seen) // 2], seen[-1]
    assert last[1] <= middle[1] + 2, "descriptors grow"
    assert last[0] <= 1.1 * middle[0], "memory grows"
    taken = [1000 * (after[2] - before[2]) for before, after in itertools.pairwise(seen)]
    quarter = max(1, len(taken) // 4)
    early, late = statistics.median(taken[quarter : 2 * quarter]), statistics.median(taken[-quarter:])
    assert late <= 1.5 * early + 1, f"a round takes {early:.2f} ms at first and {late:.2f} ms at last"
    figures = {
        "MB": last[0] // 1024,
        "descriptors": last[1],
        "us early": int(1000 * early),
        "us late": int(1000 * late),
    }
    return Counter({"rounds": count, **figures})


# Readers


def fuzz(count: int, rng: random.Random, folder: Path) -> Counter[str]:
    """Every reader, on so many damaged or made-up files; the slow ones on fewer."""
    return Counter({name: check(name, count, seed=rng.randrange(2**32)) for name in TARGETS})


Part = Callable[[int, random.Random, Path], Mapping[str, int]]

PARTS: dict[str, tuple[Part, int]] = {
    "updates": (mutated_updates, 3000),
    "folders": (damaged_folders, 60),
    "kills": (kills, 20),
    "flower-kills": (flower_kills, 1),
    "disk": (full_disk, 40),
    "rounds": (many_rounds, 200),
    "fuzz": (fuzz, 100),
}
"""By name: what is done, and how often by default."""


def main() -> None:
    """Run the parts that have a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (_, size) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("dynafed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for name, (part, _) in PARTS.items():
        if size := getattr(args, name.replace("-", "_")):
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                outcomes = part(size, random.Random(f"{args.seed}/{name}"), Path(folder))
            seconds = round(time.monotonic() - began)
            print(
                json.dumps({name: size, "seed": args.seed, "seconds": seconds, "outcomes": dict(outcomes)}), flush=True
            )


if __name__ == "__main__":
    main()

"""A: seconds from the command to an accuracy: DynaFed and FedAvg here, FedAvg by the same protocol elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from peers.protocol import Workload

from bench import processes
from bench.places import ENVIRONMENTS, HERE
from bench.rounds import CORES, PEERS
from bench.sides import CLEARED, Player

PRESETS = ("cpu-fmnist-mlp", "cpu-fmnist-convnet", "cpu-cifar10")
METHODS = ("fedavg", "dynafed")
REFERENCE = "ours, fedavg"
SHARE = 0.95
"""Of the reference's final accuracy, which is the mean of its last rounds: what all sides are to reach."""
LAST = 5
BESIDE = tuple({side.name: side for side in PEERS if side.name in ("pfl", "flower")}.values())
"""Peers with the same protocol, with all cores."""
CURVES = ENVIRONMENTS / "accuracy"
"""Where what was measured is kept until all of a preset is there."""


def measure(
    presets: Sequence[str],
    peers: Sequence[str],
    environment: Mapping[str, str],
    before: Mapping[str, Any],
    rounds: int = 0,
    peer_rounds: int = 0,
) -> dict[str, Any]:
    """The curves of every preset, one side after the other; what was measured before is not measured again.

    Runs of ours that were interrupted are resumed. `rounds` and `peer_rounds` are fewer than the preset's.
    """
    found = dict(before.get("presets", {})) if before.get("machine", {}).get("cores") == CORES else {}
    for preset in presets:
        folder = CURVES / f"{preset}-{rounds or 'all'}-{CORES}"
        curves = [ours(preset, method, folder, environment, rounds) for method in METHODS]
        settings = settings_of(folder / f"ours-{METHODS[0]}" / "run")
        chosen = [side for side in BESIDE if side.name in peers]
        if any(not (folder / f"{side.name}.json").exists() for side in chosen):
            workload = export(settings, folder / "data")
        for side in chosen:
            file = folder / f"{side.name}.json"
            if not file.exists():
                with Player(side, workload, folder / "data", environment) as player:
                    _follow(player, min(peer_rounds or settings.rounds, settings.rounds), file)
            curves.append(json.loads(file.read_text()))
        found[preset] = compared(curves, settings.rounds)
    return {"repeats": 1, "note": "one side after the other, on a machine that isn't ours alone", "presets": found}


def ours(preset: str, method: str, folder: Path, environment: Mapping[str, str], rounds: int) -> dict[str, Any]:
    """A run as a user starts it; the clock runs from the command until a round's line is in metrics.jsonl.

    If it was interrupted, the clock goes on from the last line, and what the new start takes counts, too.
    """
    place = folder / f"ours-{method}"
    place.mkdir(parents=True, exist_ok=True)
    file, run = place / "curve.json", place / "run"
    curve: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if not curve.get("done"):
        curve = {"side": f"ours, {method}", "seconds": curve.get("seconds", []), "starts": curve.get("starts", 0) + 1}
        changes = ["-s", f"method={method}", *(["-s", f"rounds={rounds}"] if rounds else [])]
        resumed = (run / "checkpoint").exists()
        words = ["resume", str(run)] if resumed else ["run", preset, *changes, "--out", str(run)]
        if not resumed:
            shutil.rmtree(run, ignore_errors=True)
        print(f"  {curve['side']}: {' '.join(words[:2])}", file=sys.stderr, flush=True)
        try:
            for line, elapsed in _lines(words, run / "metrics.jsonl", environment, curve["seconds"]):
                curve["seconds"][line:] = [elapsed]
            curve["done"] = True
        finally:
            file.write_text(json.dumps(curve))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve["accuracy"] = [record["accuracy"] for record in records]
    return curve


def _lines(
    words: Sequence[str], file: Path, environment: Mapping[str, str], before: Sequence[float]
) -> Iterator[tuple[int, float]]:
    """Run our command; yields the number of each line of a file and when it was there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CLEARED) or name == "DYNAFED_DATA"}
    source = {"PYTHONPATH": str(HERE.parent / "src")}
    known = file.read_bytes().count(b"\n") if file.exists() else 0
    began, offset = time.perf_counter(), before[known - 1] if known else 0.0
    command = [sys.executable, "-m", "dynafed", *words]
    log = (file.parent.parent / "log").open("a")
    process = subprocess.Popen(command, env={**kept, **source, **environment}, stdout=log, stderr=log)
    try:
        ended, size = False, -1
        while not ended:
            time.sleep(0.01)
            ended = process.poll() is not None
            if not file.exists() or file.stat().st_size == size:
                continue
            size, there = file.stat().st_size, file.read_bytes().count(b"\n")
            if there < known:  # a resumed run goes on from its checkpoint
                known, offset = there, before[there - 1] if there else 0.0
            for line in range(known, there):
                yield line, offset + time.perf_counter() - began
            known = there
        if process.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with code {process.returncode}: see {log.name}")
    finally:
        everyone = processes.family(process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        processes.end(everyone, 20)
        process.wait()
        log.close()


def settings_of(run: Path) -> Any:
    """The config of a run."""
    import dynafed

    return dynafed.Config.load(run / "config.toml")


def export(settings: Any, folder: Path) -> Workload:
    """The run's own samples, split and normalized, for the peers; each client's in a random order, because not all of
    them shuffle."""
    from dynafed.engine.federation import Federation

    federation = Federation.create(settings)
    clients = [federation.client(client) for client in range(settings.clients)]
    rng = np.random.default_rng(0)
    (size,) = {len(client.y) for client in clients}
    orders = [rng.permutation(size) for _ in clients]
    test = federation.evaluation_data(0, federation.evaluation_size())
    folder.mkdir(parents=True, exist_ok=True)
    for name, arrays in {"x": [c.x.numpy() for c in clients], "y": [c.y.numpy() for c in clients]}.items():
        np.save(folder / f"{name}.npy", np.concatenate([a[order] for a, order in zip(arrays, orders, strict=True)]))
    for name, tensor in zip(("test_x", "test_y"), test, strict=True):
        np.save(folder / f"{name}.npy", tensor.numpy())
    return Workload(
        "accuracy",
        settings.model,
        settings.to_dict()[settings.model]["width"],
        tuple(clients[0].x.shape[1:]),
        clients=settings.clients,
        per_round=settings.sampled,
        samples=size,
        classes=federation.problem.classes,
        batch=settings.batch_size,
        lr=settings.lr,
        optimizer=settings.optimizer,
    )


def _follow(player: Player, rounds: int, file: Path) -> None:
    """Write down a peer's rounds, each evaluated, from its start on; if it is interrupted, those that there were."""
    print(f"  {player.side.label}: {rounds} rounds", file=sys.stderr, flush=True)
    seconds, accuracy, now = list[float](), list[float](), player.started
    try:
        for _ in range(rounds):
            said = player.play(1)
            now += said["seconds"][0]
            seconds.append(now)
            accuracy += said["accuracies"]
    finally:
        curve = {"side": player.side.label, **player.facts, "started": player.started, "steps": player.steps}
        if seconds:
            file.write_text(json.dumps(curve | {"seconds": seconds, "accuracy": accuracy}))


def compared(curves: Sequence[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """When each side is at the target."""
    (reference,) = (curve for curve in curves if curve["side"] == REFERENCE)
    final = statistics.fmean(reference["accuracy"][-LAST:])
    return {
        "rounds": rounds,
        "final": final,
        "target": SHARE * final,
        "sides": [curve | reached(curve, reference, SHARE * final, rounds) for curve in curves],
    }


def reached(curve: Mapping[str, Any], reference: Mapping[str, Any], target: float, rounds: int) -> dict[str, Any]:
    """When a curve is at the target for the first time, and when the mean of its last rounds is.

    A side that was timed for a part of the rounds has the reference's accuracies, and its own seconds a round.
    """
    seconds, accuracy = list(curve["seconds"]), curve["accuracy"]
    timed = len(seconds)
    each = (seconds[-1] - seconds[0]) / (timed - 1) if timed > 1 else seconds[0]
    if timed < rounds:
        accuracy = reference["accuracy"]
        seconds += [seconds[-1] + each * more for more in range(1, rounds - timed + 1)]
    smooth = [statistics.fmean(accuracy[max(0, end - LAST) : end]) for end in range(1, len(accuracy) + 1)]
    first = next((number for number, value in enumerate(accuracy) if value >= target), None)
    lasting = next((number for number, value in enumerate(smooth) if value >= target and number + 1 >= LAST), None)
    return {
        "timed": timed,
        "a_round": each,
        "drawn_seconds": seconds,
        "drawn_accuracy": list(accuracy),
        "final": statistics.fmean(accuracy[-LAST:]),
        "first": None if first is None else {"round": first + 1, "seconds": seconds[first]},
        "lasting": None if lasting is None else {"round": lasting + 1, "seconds": seconds[lasting]},
    }


def plot(found: Mapping[str, Any], file: Path) -> None:
    """Accuracy against seconds, a panel for each preset."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    presets = found["presets"]
    figure, grid = plt.subplots(1, len(presets), figsize=(6 * len(presets), 4), squeeze=False, layout="constrained")
    for panel, (preset, one) in zip(grid[0], presets.items(), strict=True):
        for side in one["sides"]:
            drawn, whole = side["drawn_accuracy"], side["timed"] >= one["rounds"]
            smooth = [statistics.fmean(drawn[max(0, end - LAST) : end]) for end in range(1, len(drawn) + 1)]
            label = side["side"] + ("" if whole else f" ({side['timed']} rounds timed)")
            panel.plot(side["drawn_seconds"], [100 * value for value in smooth], "-" if whole else "--", label=label)
        panel.axhline(100 * one["target"], color="gray", linewidth=0.8, linestyle=":")
        panel.set_xscale("log")
        panel.set_title(preset)
        panel.set_xlabel("seconds since the start")
        panel.grid(True, which="both", alpha=0.25)
        panel.legend()
    grid[0][0].set_ylabel(f"accuracy, %, mean of {LAST} rounds")
    figure.savefig(file, dpi=110)
    plt.close(figure)

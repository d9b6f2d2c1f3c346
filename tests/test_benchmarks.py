"""The benchmark suite, in toy sizes and without the peers: does everybody do the same work, and is it written down?"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from bench import accuracy, growth, machine, methods, rounds, sides, synthesis, table
from bench.workloads import W1, W2, W4, W5, W6, toy, write_data
from peers.matching import peer as matching
from peers.ours.job import CLEAR, config, replay
from peers.protocol import Workload
from peers.torch_side import network

from dynafed import kernels, models
from dynafed.kernels import build


@pytest.mark.parametrize("workload", [toy(W1), toy(W2)], ids=["mlp", "convnet"])
def test_everybody_trains_the_same_network(workload: Workload) -> None:
    theirs, ours = network(workload), models.build(config(workload), workload.shape, workload.classes)
    assert [p.shape for p in theirs.parameters()] == [p.shape for p in ours.parameters()]
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        mine.data.copy_(other.data)
    x = torch.randn(3, *workload.shape)
    torch.testing.assert_close(ours(x), theirs(x))


OWN = replace(W1, model="own mlp")


@pytest.mark.parametrize(
    "workload",
    [toy(workload) for workload in (W1, W2, W4, W5, OWN, *W6)],
    ids=lambda workload: f"{workload.model}-{workload.method}",
)
def test_a_client_of_ours_does_the_steps_that_we_claim(workload: Workload) -> None:
    seen = replay(workload)
    assert seen.steps == workload.steps
    assert seen.apart * CLEAR < seen.one_step


def test_sides_take_turns_and_the_table_says_what_they_did(tmp_path: Path) -> None:
    workload = toy(W1)
    plain = {side.options["loop"]: side for side in rounds.PLAIN if side.options["threads"] == 1}
    playing = [*rounds.OURS, rounds.OWN, *plain.values(), sides.Side("floor", "1 process", {"threads": 1})]
    broken = sides.Side("plain", "broken", {"loop": "none", "threads": 1})
    data = write_data(workload, tmp_path / "data")
    results, absent = sides.interleave([(side, workload, data) for side in [*playing, broken]], 2, {}, warm_up=1)
    assert [result["side"] for result in results] == [side.label for side in playing]
    assert [entry["side"] for entry in absent] == ["plain, broken"]
    assert "KeyError" in absent[0]["reason"]
    whole = workload.to_json() | {"steps_a_client": workload.steps}
    found = rounds.summary(whole, 2, results, absent)
    results = found["sides"]
    assert {result["steps_a_client"] for result in results} == {workload.steps}
    assert len({result["parameters"] for result in results}) == 1
    assert {len(result["seconds"]) for result in results} == {2}
    losses = [result["loss"] for result in results if result["loss"] is not None]
    assert len(losses) == 4
    assert max(losses) < 3

    assert set(found["best"]) == {"ours", "own network", "plain loader", "plain careful", "floor"}
    again = rounds.together(found, found | {"sides": results[:2]})
    assert [len(result["seconds"]) for result in again["sides"]] == [4, 4, 2, 2, 2]
    assert all(result["same_work"] for result in again["sides"])
    assert again["best"] == found["best"]
    assert again["absent"] == absent
    (tmp_path / "w1.json").write_text(json.dumps({"machine": machine.describe(), "environment": {}, **found}))
    page = table.render(tmp_path)
    assert "| plain, careful, 1 thread |" in page
    assert "plain, broken (ended with code 1" in page
    assert "fewer than five" in page
    assert str(tmp_path) not in page


def test_who_skips_steps_is_out_of_competition() -> None:
    workload = {"per_round": 4, "steps_a_client": 2}
    lazy = {"name": "fedjax", "side": "fedjax, jit", "options": {}, "best": 0.1, "rounds": 2, "steps": 1}
    honest = lazy | {"name": "ours", "side": "ours", "best": 1.0, "steps": 2 * 4 * 2}
    best = rounds.best_of_each([rounds.checked(one, workload) for one in (lazy, honest)])
    assert list(best) == ["ours"]


def test_methods_are_compared_with_those_who_have_them() -> None:
    sides = {workload.method: {side.name for side in rounds.sides_of(workload, rounds.NAMES)} for workload in W6}
    assert sides == {
        "fedprox": {"ours", "pfl", "fluke"},
        "scaffold": {"ours", "pfl", "fluke"},
        "moon": {"ours", "fluke"},
    }


def test_both_ways_to_the_synthesis_gradient_agree() -> None:
    given = matching.problem((3, 8, 8), 4, 4, 6)
    for mine, theirs in zip(matching.ours(*given, 0.1, 3), matching.unrolled(*given, 0.1, 3), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_what_is_measured_runs_on_our_kernels() -> None:
    model = matching.prepare(matching.problem((3, 8, 8), 4, 16, 6)[0])
    assert build.library() is None or kernels.ConvNet.of(model) is not None


def test_widths_measured_one_by_one_are_one_measurement() -> None:
    def found(width: int, cpu: str = "one") -> dict[str, Any]:
        same: dict[str, Any] = {"environment": {}, "images": 2, "steps": 1, "threads": 1, "repeats": 1}
        flat = {"width": width, "points": [width] if width == 32 else []}
        return same | {"machine": {"cpu": cpu}, "widths": [{"width": width}], "flatness": flat}

    both = synthesis.merged(found(32), found(128))
    assert [one["width"] for one in both["widths"]] == [32, 128]
    assert both["flatness"]["points"] == [32]
    assert synthesis.merged(found(32, "other"), found(128)) == found(128)


def test_exponents_and_their_picture(tmp_path: Path) -> None:
    points = [{"value": n, "seconds": 0.1 * n**2, "memory_mb": 7.0} for n in (1, 10, 100)]
    axis = {"axis": "clients", "title": "clients in total", "points": points, "absent": []}
    gradient_function = {f"exponent_{name}": growth.exponent(points, key) for name, key in _KEYS.items()}
    assert gradient_function["exponent_seconds"] == pytest.approx(2)
    assert gradient_function["exponent_memory"] == pytest.approx(0)
    found = {"machine": machine.describe(), "environment": {}, "repeats": 5, "axes": [axis | gradient_function]}
    growth.plot(found, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size
    (tmp_path / "growth.json").write_text(json.dumps(found))
    assert "| clients in total | 1, 10, 100 |" in table.render(tmp_path)


_KEYS = {"seconds": "seconds", "memory": "memory_mb"}


def test_every_point_of_every_axis_is_a_job() -> None:
    for axis in growth.AXES:
        for value in axis.values:
            side, workload = growth.point(axis, value)
            sizes = side.options if side.name == "matching" else workload.to_json()
            assert sizes[{"images": "synthetic"}.get(axis.name, axis.name)] == value
            assert workload.per_round <= workload.clients
    assert synthesis.job(32).width == 32


def test_seconds_to_an_accuracy(tmp_path: Path) -> None:
    rising = [number / 10 for number in range(1, 11)]
    reference = {"side": accuracy.REFERENCE, "seconds": [float(n) for n in range(1, 11)], "accuracy": rising}
    slow = {"side": "pfl, 2 processes", "seconds": [8.0, 10.0], "accuracy": [0.0, 0.1]}
    one = accuracy.compared([reference, slow], rounds=10)
    assert one["target"] == pytest.approx(0.95 * 0.8)
    ours, theirs = one["sides"]
    assert ours["first"] == {"round": 8, "seconds": 8.0}
    assert ours["lasting"] == {"round": 10, "seconds": 10.0}
    assert theirs["first"] == {"round": 8, "seconds": 10.0 + 6 * 2.0}
    assert (theirs["timed"], theirs["a_round"]) == (2, 2.0)
    found = {"machine": machine.describe(), "environment": {}, "repeats": 1, "presets": {"demo": one}}
    accuracy.plot(found, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size
    (tmp_path / "accuracy.json").write_text(json.dumps(found))
    page = table.render(tmp_path)
    assert "| demo | ours, fedavg | 76.0 % | 8 (8) | 10 (10) |" in page
    assert "| demo | pfl, 2 processes (2 rounds timed) | 76.0 % | 22 (8) | 26 (10) |" in page


def test_a_run_of_ours_is_followed(tmp_path: Path) -> None:
    curve = accuracy.ours("demo", "fedavg", tmp_path, {}, rounds=2)
    assert len(curve["seconds"]) == len(curve["accuracy"]) == 2
    assert 0 < curve["seconds"][0] < curve["seconds"][1]
    assert curve["starts"] == 1
    assert accuracy.ours("demo", "fedavg", tmp_path, {}, rounds=2) == curve
    settings = accuracy.settings_of(tmp_path / "ours-fedavg" / "run")
    workload = accuracy.export(settings, tmp_path / "data")
    assert (workload.clients, workload.per_round, workload.batch) == (20, 8, settings.batch_size)
    assert len(np.load(tmp_path / "data" / "y.npy")) == workload.clients * workload.samples


def test_methods_are_measured_in_multiples_of_fedavg(tmp_path: Path) -> None:
    ratios = methods.arithmetic(W1)
    assert ratios["scaffold"] == 2
    assert ratios["moon"] == pytest.approx(1.92, abs=0.01)
    assert ratios["fedmix"] < methods.SLACK < ratios["fedgen"] < ratios["moon"]
    sides = [{"variant": name, "best": 0.1, "median": 0.2, "loss": 1.0} for name in methods.VARIANTS]
    found = {
        "machine": machine.describe(),
        "environment": {},
        "repeats": 5,
        "sides": sides,
        "absent": [],
        "wanted": {"sgd": 1.25, "moon": 1.92},
        "times_fedavg": {"fedavg": 1.0, "sgd": 1.3, "moon": 1.5},
    }
    (tmp_path / "methods.json").write_text(json.dumps(found))
    page = table.render(tmp_path)
    assert "| times FedAvg: sgd | at most 1.25 | 1.3 | missed |" in page
    assert "| times FedAvg: moon | at most 1.92 | 1.5 | reached |" in page

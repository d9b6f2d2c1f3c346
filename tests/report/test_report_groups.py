from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_runs import MakeRun
from hypothesis import given
from hypothesis import strategies as st

from dynafed.report.charts import describe, event_marks, group_lines, run_lines, time_stack, traffic_lines
from dynafed.report.groups import (
    classes_for,
    common_round,
    common_settings,
    cumulative,
    differing_keys,
    group_runs,
    label_skew,
    mean_curve,
    mean_std,
    partitions,
)
from dynafed.report.load import Partition, Run, load_run
from dynafed.report.measures import extra_keys


def run_of(*accuracies: float | None, path: str = "run", **config: Any) -> Run:
    rounds = tuple({"round": index, "accuracy": value} for index, value in enumerate(accuracies, 1))
    return Run(Path(path), config, rounds)


def test_runs_that_differ_in_seed_and_execution_are_one_group() -> None:
    runs = [
        run_of(0.1, method="fedavg", alpha=0.1, seed=1, workers=4, device="cuda", data_dir="/a"),
        run_of(0.2, method="fedavg", alpha=0.01, seed=0),
        run_of(0.3, method="fedavg", alpha=0.1, seed=0, threads=2, checkpoint_every=5, client_memory_mb=1),
    ]
    groups = group_runs(runs)
    assert [group.label for group in groups] == ["fedavg, alpha=0.1", "fedavg, alpha=0.01"]
    assert groups[0].seeds == [0, 1]
    assert not groups[0].finished


def test_diagnostics_and_a_seed_again_are_no_other_observation() -> None:
    runs = [
        run_of(0.1, 0.2, method="fedavg", seed=0),
        run_of(0.1, 0.2, 0.3, method="fedavg", seed=0, watch=[1], eval_every=2, **{"dynafed.evidence": True}),
        run_of(0.5, method="fedavg", seed=1, target_accuracy=0.5),
    ]
    (group,) = group_runs(runs)
    assert group.seeds == [0, 1]
    assert group.distinct == (runs[1], runs[2])
    assert group.over_seeds(lambda run: run.final)[0] == pytest.approx((0.2 + 0.5) / 2)
    assert common_round([group]) == 1
    assert common_round(group_runs(runs[:1])) is None


def test_labels_name_only_what_differs() -> None:
    runs = [
        run_of(method="fedavg", lr=0.1, **{"mlp.width": 64}),
        run_of(method="fedprox", lr=0.1, **{"mlp.width": 64, "fedprox.mu": 0.1}),
        run_of(method="fedprox", lr=0.1, **{"mlp.width": 64, "fedprox.mu": 0.5}),
    ]
    assert [g.label for g in group_runs(runs)] == ["fedavg", "fedprox, fedprox.mu=0.1", "fedprox, fedprox.mu=0.5"]
    twins = group_runs([run_of(method="fedavg"), run_of(method="fedavg", extra=True)])
    assert [group.label for group in twins] == ["fedavg (1)", "fedavg (2)"]


def test_a_method_alone_is_the_label() -> None:
    assert [group.label for group in group_runs([run_of(seed=0), run_of(seed=1)])] == ["run"]


def test_mean_and_sample_deviation() -> None:
    assert mean_std([]) == (None, None)
    assert mean_std([0.5]) == (0.5, None)
    assert mean_std([1.0, 2.0, 3.0]) == (2.0, 1.0)


def test_the_curve_of_three_seeds_is_mean_and_deviation() -> None:
    joined = mean_curve([[(1, 0.1), (2, 0.4)], [(1, 0.2), (2, 0.5)], [(1, 0.3), (2, 0.9)]])
    assert joined.rounds == [1, 2]
    assert joined.mean == pytest.approx([0.2, 0.6])
    assert joined.low == pytest.approx([0.1, 0.6 - 0.07**0.5])
    assert joined.high == pytest.approx([0.3, 0.6 + 0.07**0.5])
    assert joined.count == [3, 3]


def test_the_band_of_two_seeds_is_their_range() -> None:
    joined = mean_curve([[(1, 0.1)], [(1, 0.5)]])
    assert (joined.mean, joined.low, joined.high) == (pytest.approx([0.3]), [0.1], [0.5])


def test_runs_of_differing_length_count_where_they_are() -> None:
    joined = mean_curve([[(1, 0.2), (2, 0.4), (3, 0.6)], [(1, 0.4)], [(1, 0.6), (2, None)]])
    assert joined.rounds == [1, 2, 3]
    assert joined.mean == pytest.approx([0.4, 0.4, 0.6])
    assert joined.count == [3, 1, 1]
    assert joined.low[1:] == joined.high[1:] == [0.4, 0.6]


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=1, max_size=5))
def test_the_band_holds_the_mean(values: list[list[float]]) -> None:
    joined = mean_curve(list(enumerate(seed)) for seed in values)
    assert len(joined.rounds) == max(map(len, values))
    for low, mean, high in zip(joined.low, joined.mean, joined.high, strict=True):
        assert low <= mean + 1e-12
        assert mean <= high + 1e-12


def test_a_groups_numbers_are_over_the_seeds_that_have_them() -> None:
    group = group_runs([run_of(0.2, seed=0), run_of(0.4, seed=1), run_of(seed=2)])[0]
    assert group.over_seeds(lambda run: run.final) == (pytest.approx(0.3), pytest.approx(0.02**0.5))


def test_cumulative_sums() -> None:
    run = Run(Path("x"), {}, ({"round": 1, "a": 1, "b": 2}, {"round": 3, "a": 4}))
    assert cumulative(run, ("a", "b")) == [(1, 3), (3, 7)]
    assert cumulative(run, ("a", "c")) is None


def test_compared_series_know_how_many_seeds_they_hold(make_run: MakeRun) -> None:
    paths = [make_run("a", rounds=4), make_run("b", rounds=3, planned=4, seed=1), make_run("c", method="x", rounds=2)]
    spec = group_lines(group_runs([load_run(path) for path in paths]), "accuracy")
    assert spec is not None
    first, second = spec["series"]
    assert first["n"] == [2, 2, 2, 1]
    assert first["of"] == 2
    assert "n" not in second
    assert first["alt"]["traffic"] == [1.6e6, 3.2e6, 4.8e6, 6.4e6]
    assert group_lines(group_runs([load_run(paths[0])]), "nothing") is None


def test_differing_and_common_keys() -> None:
    configs = [{"a": 1, "b": 2, "workers": 1}, {"a": 1, "b": 3, "c": 4, "workers": 2}]
    assert differing_keys(configs) == ["b"]
    assert common_settings(configs) == {"a": 1}


@pytest.mark.parametrize(
    ("counts", "classes"), [([100, 0, 0], 1), ([90, 10, 0], 1), ([89, 11, 0], 2), ([1] * 10, 9), ([0, 0], 0)]
)
def test_classes_that_hold_ninety_percent(counts: list[int], classes: int) -> None:
    assert classes_for(counts) == classes


def test_skew_of_a_partition_worked_out_by_hand() -> None:
    told = label_skew(Partition(4, 3, (0, 1, 2), ((10, 0, 0, 0), (5, 5, 0, 0), (0, 0, 0, 0))))
    assert told == {"classes": 1.5, "main": 0.75, "even": 4, "smallest": 0, "middle": 10, "largest": 10}
    assert label_skew(Partition(4, 0, (), ()))["classes"] == 0


def test_distinct_partitions_are_named_by_what_differs(make_run: MakeRun) -> None:
    runs = [
        load_run(make_run(f"{method}-{seed}", method=method, seed=seed, rounds=1))
        for method in ("fedavg", "moon")
        for seed in (0, 1)
    ]
    assert [name for name, _ in partitions(runs)] == ["seed=0", "seed=1"]
    assert [name for name, _ in partitions(runs[::2])] == [""]
    assert partitions([run_of(0.1)]) == []
    other = load_run(make_run("other", rounds=1, clients=8, classes=5))
    assert [name for name, _ in partitions([runs[0], other])] == ["partition 1", "partition 2"]


def test_other_numbers_are_found_flat_and_parted_by_whether_they_vary(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        record |= {"norm": index / 2, "kept": 7, "flag": True, "deep": {"er": index}, "word": "x"}

    run = load_run(make_run(rounds=3, each=each))
    extra = extra_keys([run])
    assert extra.varying == ["norm", "deep.er"]
    assert extra.constant == {"lr": 0.001, "kept": 7}
    assert extra.once == []


def test_charts_of_a_run(make_run: MakeRun) -> None:
    run = load_run(make_run(rounds=3))
    stacked = time_stack(run)
    assert stacked is not None
    assert [part["name"] for part in stacked["series"]] == ["clients", "server", "evaluation", "other"]
    assert traffic_lines(run) is None
    assert event_marks(run) is None
    spec = run_lines(run, {"accuracy": "accuracy", "missing": "missing"}, format="percent")
    assert spec is not None
    assert [line["name"] for line in spec["series"]] == ["accuracy"]
    assert "%" in describe("Accuracy", spec)
    assert run_lines(run, {"missing": "missing"}) is None
    bare = run_of(0.1)
    assert time_stack(bare) is None


def test_events_are_counted_by_round(make_run: MakeRun) -> None:
    def each(index: int, record: dict[str, Any]) -> None:
        if index == 2:
            record |= {"dropped": [4, 5], "rejected": [{"client": 1, "reason": "nan"}], "repeats": 3, "skipped": True}
        if index == 4:
            record |= {"dropped": [1], "loss": float("inf"), "bytes_up": 5}

    run = load_run(make_run(rounds=5, each=each))
    spec = event_marks(run)
    assert spec is not None
    assert {row["name"]: (row["x"], row["n"]) for row in spec["rows"]} == {
        "dropped": ([2, 4], [2, 1]),
        "rejected": ([2], [1]),
        "repeated": ([2], [3]),
        "skipped": ([2], [1]),
        "not finite": ([4], [1]),
    }
    assert traffic_lines(run) is not None

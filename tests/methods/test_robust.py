"""Averages of a handful of numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import federation_for, round_context
from problems import tiny

from dynafed import UserError
from dynafed.messages import Update
from dynafed.methods.krum import krum_scores
from dynafed.methods.robust import part
from dynafed.tree import Tree

VALUES = [1.0, 2.0, 4.0, 5.0, 100.0]


def model(value: float) -> Tree:
    """A model whose weights all have one value, with buffers."""
    start = federation_for().problem.initial_model()
    return {name: torch.full_like(tensor, value) for name, tensor in start.items()} | {
        "steps": torch.tensor(int(value))
    }


def combined(method: str, values: list[float], **settings: Any) -> Tree:
    federation = federation_for(method, **settings)
    combiner = federation.methods.combiner(round_context(federation))
    for client, value in enumerate(values):
        combiner.add(Update(client, model(value), 1, 1, 0.0, 0.0))
    return combiner.result().model


@pytest.mark.parametrize(
    ("method", "values", "settings", "expected", "steps"),
    [
        ("median", VALUES, {}, 4.0, 4),
        ("median", VALUES[:4], {}, 3.0, 3),
        ("median", VALUES[:1], {}, 1.0, 1),
        ("trimmed-mean", VALUES, {}, 11 / 3, 4),  # a tenth of five, rounded up, is one at either end
        ("trimmed-mean", VALUES, {"trimmed-mean__share": 0.5}, 4.0, 4),
        ("trimmed-mean", VALUES, {"trimmed-mean__share": 0.0}, 112 / 5, 22),
        ("trimmed-mean", VALUES[:2], {}, 1.5, 2),
        ("krum", VALUES, {}, 2.0, 2),
        ("krum", VALUES, {"krum__keep": 2}, 3.0, 3),
        ("krum", VALUES[:2], {}, 1.0, 1),
        ("krum", VALUES[:1], {}, 1.0, 1),
        ("multi-krum", VALUES, {}, 3.0, 3),
        ("multi-krum", VALUES[:2], {}, 1.5, 2),
        ("geometric-median", VALUES, {"geometric-median__iterations": 50}, 4.0, 4),
        ("geometric-median", VALUES[:1], {}, 1.0, 1),
    ],
)
def test_averages(method: str, values: list[float], settings: dict[str, Any], expected: float, steps: int) -> None:
    result = combined(method, values, **settings)
    torch.testing.assert_close(result["head.bias"], torch.full((4,), expected))
    assert result["steps"] == steps
    assert result["steps"].dtype == torch.int64


def test_krum_s_scores_by_hand() -> None:
    """Five points of which one is assumed wrong: the two nearest neighbors count."""
    points = torch.tensor([[value] for value in VALUES], dtype=torch.float64)
    # 1: 1 + 9; 2: 1 + 4; 4: 1 + 4; 5: 1 + 9; 100: 95^2 + 96^2. Equal scores: the first one wins.
    assert krum_scores(points, 1) == [10.0, 5.0, 5.0, 10.0, 95.0**2 + 96.0**2]
    assert krum_scores(points, 0) == [26.0, 14.0, 14.0, 26.0, 95.0**2 + 96.0**2 + 98.0**2]


@pytest.mark.parametrize(("share", "models", "out"), [(0.07, 100, 7), (0.1, 10, 1), (0.11, 10, 2), (0.5, 10, 4)])
def test_a_share_of_the_models_is_rounded_up_but_not_for_rounding_errors(share: float, models: int, out: int) -> None:
    assert part(share, models, spare=1) == out


def test_two_liars_of_nine_don_t_move_them_far() -> None:
    values = [0.9, 0.95, 1.0, 1.0, 1.05, 1.1, 1.0, -1000.0, 1000.0]
    for method, settings in (
        ("median", {}),
        ("trimmed-mean", {}),
        ("krum", {"krum__share": 0.2}),
        ("multi-krum", {"multi-krum__share": 0.2}),
        ("geometric-median", {}),
    ):
        assert abs(float(combined(method, values, **settings)["head.bias"][0]) - 1) < 0.15


def test_norm_clipping_by_hand() -> None:
    """Changes of 1, 2 and 30 everywhere: the median norm is that of the second, so the third counts as 2."""
    federation = federation_for("norm-clipping")
    start = federation.problem.initial_model()
    combiner = federation.methods.combiner(round_context(federation))
    for client, change in enumerate((1.0, 2.0, -30.0)):
        combiner.add(Update(client, {name: tensor + change for name, tensor in start.items()}, 1, 1, 0.0, 0.0))
    for name, tensor in combiner.result().model.items():
        torch.testing.assert_close(tensor - start[name], torch.full_like(tensor, 1 / 3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "method", ["median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "norm-clipping"]
)
def test_what_is_sent_beside_a_sound_model_is_guarded_too(method: str) -> None:
    federation = federation_for(method)
    combiner = federation.methods.combiner(round_context(federation))
    start = federation.problem.initial_model()
    for client, value in enumerate([0.9, 0.95, 1.0, 1.05, 1.1, -1000.0]):
        combiner.add(Update(client, start, 1, 1, 0.0, 0.0, extras={"other": {"c": torch.full((3,), value)}}))
    assert 0.5 < float(combiner.result().extras["other"]["c"].mean()) < 1.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "krum+median"}, "both replace the average"),
        ({"method": "fedgen+krum"}, "krum distrusts single clients, but fedgen learns from every client's model"),
        ({"method": "median+feddf", "server_samples": 40}, "median distrusts single clients, but feddf"),
        ({"method": "fedmix+median"}, "median distrusts single clients, but fedmix gives what each sent before"),
        ({"method": "krum+abavg", "server_samples": 40}, "both replace the average"),
        ({"method": "median", "weighting": "examples"}, "median has weights of its own"),
        ({"method": "feddyn", "weighting": "examples"}, "feddyn's clients count alike"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny(**changes)

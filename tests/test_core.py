"""Seeds, trees and messages: the small parts that everything stands on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynafed import tree
from dynafed.messages import Broadcast, Update, validate_update
from dynafed.seeds import Seeds


def test_streams_depend_on_every_part_of_the_key_and_on_nothing_else() -> None:
    draw = lambda seed, *key: Seeds(seed).rng(*key).random()  # noqa: E731
    same = draw(0, "local", 3, 4)
    assert draw(0, "local", 3, 4) == same
    assert (
        len({same, draw(1, "local", 3, 4), draw(0, "sample", 3, 4), draw(0, "local", 4, 3), draw(0, "local", 34)}) == 5
    )


def test_torch_seeded_gives_the_key_s_numbers_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with Seeds(0).torch_seeded("layers", 1, 2):
        first = torch.rand(3)
    with Seeds(0).torch_seeded("layers", 1, 2):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(1), expected)


def test_trees_nest_pack_and_digest() -> None:
    one = {"a": torch.arange(3.0), "b/c": torch.tensor(4, dtype=torch.int64)}
    nested = tree.nest({"x": one, "y": {"d": torch.ones(2, 2)}})
    assert set(nested) == {"x/a", "x/b/c", "y/d"}
    assert tree.unnest(nested)["x"].keys() == one.keys()
    again = tree.unpack(tree.pack(nested))
    assert tree.digest(again) == tree.digest(nested)
    again["x/a"][0] += 1e-7
    assert tree.digest(again) != tree.digest(nested)
    assert tree.nbytes(one) == 12 + 8
    copy = tree.clone_contiguous(one)
    copy["a"].add_(1)
    assert one["a"][0] == 0
    lying = tree.column_major({"m": torch.arange(6.0).reshape(2, 3)}, ["m"])
    twin = tree.clone(lying)
    assert twin["m"].stride() == lying["m"].stride() == (1, 2)
    assert torch.equal(twin["m"], lying["m"])
    assert twin["m"].data_ptr() != lying["m"].data_ptr()
    assert torch.equal(tree.map_tensors(torch.add, one, one)["a"], 2 * one["a"])


GOOD = {"w": torch.zeros(2, 3), "n": torch.tensor(1)}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (GOOD, None),
        ({"w": torch.zeros(2, 3)}, "'n' is missing"),
        (GOOD | {"v": torch.zeros(1)}, "'v' is not expected"),
        (GOOD | {"w": torch.zeros(3, 2)}, "has shape"),
        (GOOD | {"w": torch.zeros(2, 3, dtype=torch.float64)}, "has dtype"),
        (GOOD | {"w": torch.full((2, 3), np.nan)}, "NaN"),
        (GOOD | {"w": torch.full((2, 3), np.inf)}, "infinity"),
        (GOOD | {"w": torch.tensor([[np.inf, -np.inf, 0.0]] * 2)}, "infinity"),
        (GOOD | {"w": torch.full((2, 3), 3e38)}, None),  # only their sum is infinite
    ],
)
def test_unsound_updates_are_named(model: tree.Tree, words: str | None) -> None:
    reason = validate_update(Update(0, model, 1, 1, 0.0, 0.0), Broadcast(1, GOOD))
    assert reason is None if words is None else words in str(reason)


def test_extras_are_checked_too_and_examples_must_be_there() -> None:
    bad = Update(0, GOOD, 5, 1, 0.0, 0.0, {"scaffold": {"c": torch.tensor([np.nan])}})
    assert "scaffold/c" in str(validate_update(bad, Broadcast(1, GOOD)))
    assert "0 examples" in str(validate_update(Update(0, GOOD, 0, 1, 0.0, 0.0), Broadcast(1, GOOD)))

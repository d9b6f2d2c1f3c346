"""Datasets and partitions that another package provides."""

from dataclasses import replace

import numpy as np
import pytest

from dynafed.data import (
    NAMES,
    PARTITIONS,
    Dataset,
    DatasetSpec,
    Format,
    check_name,
    describe,
    fetch,
    load,
    make_partition,
)
from dynafed.errors import UserError

CODE = '''
"""A package that knows nothing about dynafed's files."""
import numpy as np
from dynafed.data import Dataset, DatasetSpec, Format, from_arrays

x, y = np.arange(24, dtype=np.uint8).reshape(6, 1, 2, 2), np.array([0, 1, 0, 1, 0, 1])

def read(path, max_bytes):
    x = np.load(path)
    return (x, y), (x[:2], y[:2])

STRIPES = DatasetSpec(
    name="stripes", class_names=("up", "down", "never"), shape=(1, 2, 2), train=6, test=2,
    formats=(Format("npy file", read, markers=("stripes/x.npy",)),), note="tiny", license_name="CC0",
)

def arrays(folder):
    """Six samples."""
    return (x, y), (x[:2], y[:2])

def dataset(folder):
    assert folder is None or folder.is_dir()
    return from_arrays((x, y), (x[:2], y[:2]), "mine")

def halves(labels, clients, **settings):
    return [range(clients), range(clients, len(labels))]

NUMBER = 3
'''
ENTRY_POINTS = {
    "dynafed.datasets": {
        "stripes": "outside_data:STRIPES",
        "six": "outside_data:arrays",
        "gone": "outside_data:nothing",
    },
    "dynafed.partitions": {"halves": "outside_data:halves"},
}


@pytest.fixture
def outside(install):
    return install("outside_data", CODE, ENTRY_POINTS)


def test_a_record_is_found_read_and_listed(outside, tmp_path):
    rows = {row["name"]: row for row in describe(tmp_path)}
    assert list(rows) == [*NAMES, "stripes", "six", "gone"]
    assert (rows["stripes"]["found"], rows["stripes"]["note"]) == (False, "tiny; CC0")
    assert (rows["six"]["found"], rows["six"]["where"], rows["six"]["note"]) == (
        True,
        "outside_data.arrays",
        "Six samples.",
    )
    assert "dataset = 'gone' can't be imported" in rows["gone"]["note"]
    with pytest.raises(UserError, match=r"stripes was not found in .*: put stripes/x.npy in"):
        load("stripes", tmp_path)
    (tmp_path / "stripes").mkdir()
    np.save(tmp_path / "stripes" / "x.npy", outside.x)
    for name in ("stripes", "outside_data:STRIPES"):
        check_name(name)
        dataset = load(name, tmp_path)
        assert np.array_equal(dataset.train_x, outside.x)
        assert (dataset.name, dataset.classes, dataset.class_names) == ("stripes", 3, ("up", "down", "never"))
        assert np.allclose(dataset.mean, outside.x.mean() / 255)
    with pytest.raises(UserError, match="can't be downloaded"):
        fetch("stripes", tmp_path)


@pytest.mark.parametrize(("name", "called"), [("six", "six"), ("outside_data:dataset", "mine")])
def test_a_function_returns_arrays_or_a_dataset(outside, tmp_path, name, called):
    for folder in (None, tmp_path):
        dataset = load(name, folder)
        assert np.array_equal(dataset.train_x, outside.x)
        assert (dataset.name, dataset.classes, len(dataset.test_y)) == (called, 2, 2)


@pytest.mark.parametrize("kind", ["halves", "outside_data:halves"])
def test_a_partition_is_found(outside, rng, kind):
    PARTITIONS.check(kind)
    assert [part.tolist() for part in make_partition(kind, [0] * 5, 2, rng=rng)] == [[0, 1], [2, 3, 4]]


def test_what_is_no_dataset_is_refused(outside, register):
    for name, words in {
        "gone": "dataset = 'gone' can't be imported",
        "outside_data:NUMBER": "is int: it must be a DatasetSpec or a function",
        "outside_data:other": "can't be imported",
        "no_such_module:other": "can't be imported: No module named",
    }.items():
        with pytest.raises(UserError, match=words):
            load(name)
    made = outside.dataset(None)
    for part, words in {
        lambda folder: None: "returned NoneType: return a Dataset",
        lambda folder: (outside.x, outside.y): "pair",
        lambda folder: replace(made, classes=1): "labels up to 1, classes = 1",
        lambda folder: replace(made, class_names=("a",)): "1 class names",
        lambda folder: replace(made, train_x=made.train_x[1:]): "one label for each",
    }.items():
        register("mine", part)
        with pytest.raises(UserError, match=words):
            load("mine")
    plain = Dataset("plain", made.train_x, made.train_y, made.test_x, made.test_y, 5)
    register("mine", lambda folder: plain)
    assert (load("mine").classes, load("mine").mean) == (5, made.mean)


def test_a_record_with_wrong_channels_is_refused():
    with pytest.raises(UserError, match="each needs 3 values"):
        DatasetSpec("x", ("a",), (3, 2, 2), 1, 1, (Format("f", lambda path, max_bytes: None),), mean=(0.5,), std=(0.5,))

"""The real datasets against their official checksums; runs where DYNAFED_DATA names a folder that has them."""

import os
from pathlib import Path

import numpy as np
import pytest

from dynafed.data import DATASETS, check, load, mini
from dynafed.data.loading import find

FOLDER = Path(os.environ.get("DYNAFED_DATA", "/nowhere"))


@pytest.mark.parametrize("name", ["fmnist", "mnist", "cifar10", "cifar100"])
def test_the_files_here_are_the_official_ones(name):
    spec = DATASETS.load(name)
    if "DYNAFED_DATA" not in os.environ or find(spec, FOLDER) is None:
        pytest.skip(f"DYNAFED_DATA names no folder with {name}")
    report = check(name, FOLDER)
    assert report["official"] is True
    assert (report["train"], report["test"]) == (spec.train, spec.test)
    assert report["mean"] == report["measured_mean"]
    assert report["std"] == report["measured_std"]


def test_the_built_in_dataset_can_be_rebuilt(tmp_path, monkeypatch):
    if "DYNAFED_DATA" not in os.environ:
        pytest.skip("DYNAFED_DATA is not set")
    kept = {}
    monkeypatch.setattr(mini, "pack", lambda path, splits: kept.update(splits))
    mini.build(FOLDER, tmp_path / "mini.npz")
    built_in = load("fmnist-mini")
    assert np.array_equal(kept["train"][0], built_in.train_x)
    assert np.array_equal(kept["test"][1], built_in.test_y)

import numpy as np
import pytest

from dynafed.data import DATASETS
from dynafed.seeds import Seeds


@pytest.fixture
def rng():
    return Seeds(7).rng("tests/data")


@pytest.fixture
def images(rng):
    def make(count, *shape):
        return rng.integers(0, 256, (count, *shape), dtype=np.uint8)

    return make


@pytest.fixture
def register(monkeypatch):
    """Adds a dataset, or replaces a built-in one, during a test."""
    return lambda name, part: monkeypatch.setitem(DATASETS._added, name, part)

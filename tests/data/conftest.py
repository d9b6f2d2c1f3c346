import numpy as np
import pytest

from dynafed.seeds import Seeds


@pytest.fixture
def rng():
    return Seeds(7).rng("tests/data")


@pytest.fixture
def images(rng):
    def make(count, *shape):
        return rng.integers(0, 256, (count, *shape), dtype=np.uint8)

    return make

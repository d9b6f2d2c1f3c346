import sys

import numpy as np
import pytest

from dynafed.data import DATASETS, PARTITIONS
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


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package of one module, with entry points by group, during a test."""
    installed = []

    def forget():
        for registry in (DATASETS, PARTITIONS):
            registry.__dict__.pop("_installed", None)
            registry._loaded.clear()

    def add(name, code, groups):
        info = tmp_path / "site" / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        for group, points in groups.items():
            with (info / "entry_points.txt").open("a") as file:
                print(f"[{group}]", *(f"{key} = {place}" for key, place in points.items()), sep="\n", file=file)
        (info.parent / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(info.parent)
        forget()
        installed.append(name)
        return __import__(name)

    yield add
    forget()
    for name in installed:
        del sys.modules[name]

"""The example of docs/data.md, as an installed package."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from dynafed.data import DatasetSpec, describe, formats, load, make_partition
from dynafed.data.spec import Checksums, Download, Format
from dynafed.errors import UserError

DOCS = Path(__file__).parents[2] / "docs" / "data.md"


def snippet(comment):
    return re.search(rf"<!-- {comment} -->\n```\w+\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]


@pytest.fixture
def package(install):
    groups = tomllib.loads(snippet("entry points"))["project"]["entry-points"]
    return install("my_package", snippet("module: my_package.py"), groups)


def test_the_example_works(package, tmp_path, rng):
    rows = {row["name"]: row for row in describe(tmp_path)}
    assert (rows["stripes"]["found"], rows["noise"]["note"]) == (False, "Random rows, as a function.")
    with pytest.raises(UserError, match=r"stripes was not found in .*put stripes/stripes.npz or stripes.npz in"):
        load("stripes", tmp_path)
    y = np.arange(64) % 2
    x = rng.integers(0, 256, (64, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "stripes.npz", train_x=x, train_y=y, test_x=x[:16], test_y=y[:16])
    for name in ("stripes", "my_package:STRIPES"):
        dataset = load(name, tmp_path)
        assert np.array_equal(dataset.train_x, x)
        assert dataset.class_names == ("horizontal", "vertical")
    np.savez(tmp_path / "stripes.npz", train_x=np.zeros(2**21), train_y=y, test_x=x[:16], test_y=y[:16])
    with pytest.raises(UserError, match=r"stripes.npz unpacks to more than"):
        load("stripes", tmp_path)
    assert load("noise").shape == (8,)
    for kind in ("by-label", "my_package:by_label"):
        counts = make_partition(kind, y, 4, rng=rng).class_counts(y, 2)
        assert counts.tolist() == [[16, 0], [16, 0], [0, 16], [0, 16]]


def test_every_field_and_reader_is_told():
    text = DOCS.read_text()
    for field in DatasetSpec.__dataclass_fields__:
        assert f"`{field}`" in text
    for kind in (Checksums, Download):
        assert f"`{kind.__name__}({', '.join(kind.__dataclass_fields__)})`" in text
    assert f"`Format({', '.join(list(Format.__dataclass_fields__)[:3])})`" in text
    for reader in ("npz", "idx", "cifar_binary", "image_files", "packed"):
        assert f"`{reader}`" in text
        assert callable(getattr(formats, reader))

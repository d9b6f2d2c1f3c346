import os
import sys

import numpy as np
import pytest
from PIL import Image

from dynafed.data import check, load
from dynafed.errors import UserError

os.environ["HF_HUB_OFFLINE"] = "1"
hf = pytest.importorskip("datasets")


@pytest.fixture
def save(tmp_path):
    def write(features=None, **splits):
        rows = {name: hf.Dataset.from_dict(columns, features=features) for name, columns in splits.items()}
        hf.DatasetDict(rows).save_to_disk(tmp_path / "saved")
        return f"hf:{tmp_path / 'saved'}"

    return write


LABELS = hf.ClassLabel(names=["a", "b", "c", "d"])


def pictures(pixels):
    return [Image.fromarray(image) for image in pixels]


@pytest.mark.parametrize(("shape", "mode"), [((5, 6, 3), "color"), ((5, 6), "gray")])
def test_images_become_bytes(save, images, shape, mode):
    x = images(6, *shape)
    features = hf.Features({"img": hf.Image(), "fine": LABELS, "id": hf.Value("int64")})
    columns = {"img": pictures(x), "fine": [0, 1, 2, 0, 1, 2], "id": list(range(6))}
    name = save(features, train=columns, test=columns)
    for spelled in (name, f"{name}:img", f"{name}:img:fine", f"{name}::fine"):
        dataset = load(spelled)
        assert np.array_equal(dataset.train_x, x.transpose(0, 3, 1, 2) if mode == "color" else x[:, None])
        assert dataset.train_y.tolist() == [0, 1, 2, 0, 1, 2]
        assert (dataset.classes, dataset.class_names, dataset.name) == (4, ("a", "b", "c", "d"), spelled)
    assert check(name, None)["train"] == 6


def test_numbers_become_rows_and_validation_stands_in_for_test(save):
    columns = {"a": [1, 2, 3], "text": ["x", "y", "z"], "label": [0, 1, 1], "b": [0.5, 0.25, 4.0]}
    dataset = load(save(train=columns, validation=columns))
    assert dataset.train_x.tolist() == [[1, 0.5], [2, 0.25], [3, 4]]
    assert dataset.classes == 2


def test_a_column_of_vectors(save):
    columns = {"vector": [[1.0, 2.0], [3.0, 4.0]], "labels": [0, 1]}
    assert load(save(train=columns, test=columns) + ":vector").test_x.tolist() == [[1, 2], [3, 4]]


def test_what_does_not_fit_is_refused(save, images, tmp_path):
    columns = {"a": [1, 2], "label": [0, 1]}
    with pytest.raises(UserError, match="has the splits train, extra"):
        load(save(train=columns, extra=columns))
    name = save(train=columns, test=columns)
    with pytest.raises(UserError, match="no sample column 'b' among a, label"):
        load(f"{name}:b")
    with pytest.raises(UserError, match="no label column 'b'"):
        load(f"{name}:a:b")
    hf.Dataset.from_dict(columns).save_to_disk(tmp_path / "single")
    with pytest.raises(UserError, match="only one split"):
        load(f"hf:{tmp_path / 'single'}")
    with pytest.raises(UserError, match="nowhere' could not be loaded"):
        load(f"hf:{tmp_path / 'nowhere'}")
    texts = {"text": ["a"], "label": [0]}
    with pytest.raises(UserError, match="no sample column ''"):
        load(save(train=texts, test=texts))
    uneven = {"img": pictures(images(1, 4, 4)) + pictures(images(1, 5, 4)), "label": [0, 1]}
    with pytest.raises(UserError, match="images of 2 sizes"):
        load(save(hf.Features({"img": hf.Image(), "label": LABELS}), train=uneven, test=uneven))


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"dynafed\[hf\]"):
        load("hf:mnist")

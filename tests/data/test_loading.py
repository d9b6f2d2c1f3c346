import io
import pickle
from dataclasses import replace

import numpy as np
import pytest
from official_files import cifar_files, idx_bytes, python2_pickle, write_files, write_idx
from PIL import Image

from dynafed.data import DATASETS, NAMES, check, check_name, describe, formats, load, loading
from dynafed.data.catalog import CIFAR10, CIFAR100, MINI, SUPERCLASSES
from dynafed.errors import UserError

TEST_FILES = {"cifar10": [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"], "cifar100": ["train", "test"]}
FOLDERS = {
    "cifar10": ("cifar-10-batches-bin", "cifar-10-batches-py"),
    "cifar100": ("cifar-100-binary", "cifar-100-python"),
}


def same(dataset, train, test):
    assert np.array_equal(dataset.train_x, train[0])
    assert np.array_equal(dataset.train_y, train[1])
    assert np.array_equal(dataset.test_x, test[0])
    assert np.array_equal(dataset.test_y, test[1])


@pytest.fixture
def gray(images):
    return (images(12, 28, 28), np.arange(12) % 10), (images(4, 28, 28), np.arange(4))


@pytest.mark.parametrize("zipped", ["", "all", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]])
@pytest.mark.parametrize(
    ("name", "place", "folder"),
    [
        ("mnist", "mnist", "."),
        ("mnist", "MNIST/raw", "."),
        ("mnist", "MNIST/raw", "MNIST"),
        ("mnist", "MNIST/raw", "MNIST/raw"),
        ("fmnist", "fmnist", "fmnist"),
        ("fmnist", "FashionMNIST/raw", "."),
    ],
)
def test_idx_files_are_found_in_every_usual_place(tmp_path, gray, zipped, name, place, folder):
    train, test = gray
    write_idx(tmp_path / place, train, test, zipped)
    dataset = load(name, tmp_path / folder)
    same(dataset, (train[0][:, None], train[1]), (test[0][:, None], test[1]))
    assert (dataset.name, dataset.shape, dataset.classes) == (name, (1, 28, 28), 10)
    assert check(name, tmp_path / folder)["official"] is False


@pytest.fixture
def no_debian(register):
    fmnist = DATASETS.load("fmnist")
    register("fmnist", replace(fmnist, formats=fmnist.formats[:-1]))


def test_idx_files_outside_a_dataset_folder_are_not_read(tmp_path, gray, no_debian):
    write_idx(tmp_path, *gray)
    for name in ("mnist", "fmnist"):
        with pytest.raises(UserError, match=f"{name} was not found in {tmp_path}.*dynafed data fetch {name}"):
            load(name, tmp_path)
    with pytest.raises(UserError, match="no folder was given"):
        load("fmnist", None)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[:-1], "train-images-idx3-ubyte is damaged"),
        (lambda data: data + b"x", "is damaged"),
        (lambda data: data[:7], "is damaged"),
        (lambda data: b"", "is damaged"),
        (lambda data: b"\0\0\x0d\x03" + data[4:], "magic number is 3331, not 2051"),
        (lambda data: idx_bytes(np.zeros((11, 28, 28))), "11 images but 12 labels"),
        (lambda data: idx_bytes(np.zeros((12, 8, 8))), "shape"),
        (None, "lacks train-images-idx3-ubyte"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, gray, spoil, words):
    write_idx(tmp_path / "mnist", *gray)
    file = tmp_path / "mnist" / "train-images-idx3-ubyte"
    if spoil:
        file.write_bytes(spoil(file.read_bytes()))
    else:
        labels = tmp_path / "mnist" / "train-labels-idx1-ubyte"
        file.unlink()
        with pytest.raises(UserError, match=words):
            formats.idx(labels, 10**6)
        return
    with pytest.raises(UserError, match=words):
        load("mnist", tmp_path)


def test_a_cut_gzip_is_named(tmp_path, gray):
    write_idx(tmp_path / "mnist", *gray, "all")
    file = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte.gz is damaged"):
        load("mnist", tmp_path)


def test_labels_beyond_the_classes_are_refused(tmp_path, gray):
    (x, y), test = gray
    write_idx(tmp_path / "mnist", (x, y + 5), test)
    with pytest.raises(UserError, match="15 classes"):
        load("mnist", tmp_path)


@pytest.fixture(params=["cifar10", "cifar100"])
def cifar(request, images):
    batches = {file: (images(4, 3, 32, 32), np.arange(4) + 3) for file in TEST_FILES[request.param]}
    *train, test = batches.values()
    return request.param, batches, tuple(map(np.concatenate, zip(*train, strict=True))), test


@pytest.mark.parametrize("dump", [None, python2_pickle])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_cifar_is_read_from_both_versions_as_tar_and_as_folder(tmp_path, cifar, dump, packed, inside):
    name, batches, train, test = cifar
    folder = FOLDERS[name][dump is not None]
    place = tmp_path / name if inside else tmp_path
    archive = f"cifar-{name[5:]}-{'python' if dump else 'binary'}.tar.gz"
    write_files(place / archive if packed else place, folder, cifar_files(name, batches, dump))
    same(load(name, tmp_path), train, test)
    if not packed:
        same(load(name, place / folder), train, test)


def test_a_tar_is_read_by_exact_names_only(tmp_path, cifar):
    name, batches, _, _ = cifar
    write_files(tmp_path / f"cifar-{name[5:]}-binary.tar.gz", "../elsewhere", cifar_files(name, batches, None))
    with pytest.raises(UserError, match="lacks"):
        load(name, tmp_path)


class Evil:
    def __reduce__(self):
        return eval, ("open('/nowhere/at/all')",)


@pytest.mark.parametrize(
    "bad",
    [
        python2_pickle({"data": Evil(), "labels": []}),
        python2_pickle({"data": np.array([Evil()], dtype=object), "labels": [0]}),
        pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [0]}, protocol=4),
        b"cos\nsystem\n(S'true'\ntR.",
        b"cnumpy\nload\n(S'file'\ntR.",
    ],
)
def test_pickles_that_ask_for_more_than_arrays_are_refused(tmp_path, images, bad):
    batches = {file: (images(1, 3, 32, 32), np.zeros(1, int)) for file in TEST_FILES["cifar10"]}
    files = cifar_files("cifar10", batches, python2_pickle) | {"data_batch_2": bad}
    write_files(tmp_path, "cifar-10-batches-py", files)
    with pytest.raises(
        UserError, match=r"batches-py is damaged.*(asks to run .*(eval|system|load)|not of uint8|protocol 4)"
    ):
        load("cifar10", tmp_path)


def test_damaged_cifar_files_are_named(tmp_path, images):
    batches = {file: (images(2, 3, 32, 32), np.zeros(2, int)) for file in TEST_FILES["cifar100"]}
    files = cifar_files("cifar100", batches, None)
    write_files(tmp_path / "cut", "cifar-100-binary", files | {"train.bin": files["train.bin"][:-1]})
    write_files(tmp_path / "part", "cifar-100-binary", {"train.bin": files["train.bin"]})
    write_files(tmp_path / "tar" / "cifar-100-binary.tar.gz", "cifar-100-binary", files)
    tar = tmp_path / "tar" / "cifar-100-binary.tar.gz"
    tar.write_bytes(tar.read_bytes()[:5000])
    for place, words in {"cut": "damaged", "part": "lacks cifar-100-binary/test.bin", "tar": "damaged"}.items():
        with pytest.raises(UserError, match=f"cifar-100-binary.* {words}|{words}"):
            load("cifar100", tmp_path / place)


def png(pixels, mode="RGB"):
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0) if mode == "RGB" else pixels[0]).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize("place", ["cinic10", "CINIC-10.tar.gz", "CINIC-10/CINIC-10.tar.gz"])
@pytest.mark.parametrize("prefix", ["", "./"])
def test_cinic_images_are_read_in_order_from_train_and_test(tmp_path, images, place, prefix):
    x, y = images(30, 3, 32, 32), np.repeat(np.arange(10), 3)
    files = {}
    for split in ("test", "valid", "train"):
        for number in reversed(range(30)):
            files[f"{prefix}{split}/{CIFAR10[y[number]]}/n{number:02d}.png"] = png(
                x[number] if split == "train" else 255 - x[number]
            )
    files["train/airplane/.DS_Store"] = b"junk"
    write_files(tmp_path / place, "", files)
    dataset = load("cinic10", tmp_path)
    same(dataset, (x, y), (255 - x, y))
    assert dataset.name == "cinic10"


def test_a_listing_counts_the_samples_that_are_there(tmp_path):
    (tmp_path / "cinic10_sample2000.npz").touch()
    row = next(row for row in describe(tmp_path) if row["name"] == "cinic10")
    assert (row["train"], row["test"], row["found"]) == (1000, 1000, True)
    missing = next(row for row in describe(None) if row["name"] == "cinic10")
    assert (missing["train"], missing["test"], missing["found"]) == (90_000, 90_000, False)


def test_gray_cinic_images_become_color_and_missing_splits_are_named(tmp_path, images):
    x = images(1, 3, 32, 32)
    write_files(tmp_path / "cinic10", "", {"train/airplane/a.png": png(x[0], "L")})
    with pytest.raises(UserError, match="no images test/CLASS"):
        load("cinic10", tmp_path)
    write_files(tmp_path / "cinic10", "", {"test/truck/a.png": png(x[0])})
    gray = load("cinic10", tmp_path).train_x[0].numpy()
    assert (gray == x[0, :1]).all()
    write_files(tmp_path / "cinic10", "", {"test/truck/b.png": b"no image"})
    with pytest.raises(UserError, match="damaged"):
        load("cinic10", tmp_path)


def mosaics(x, split, y):
    """Two lossless WebP mosaics: 100 images, and what is left, padded with black."""
    arrays = {f"{split}_count": np.array(len(x)), f"{split}_labels": y.astype(np.uint8)}
    for number, rows in enumerate((x[:100], x[100:])):
        tiles = np.zeros((100, 32, 32, 3), np.uint8)
        tiles[: len(rows)] = rows.transpose(0, 2, 3, 1)
        file = io.BytesIO()
        Image.fromarray(tiles.transpose(1, 0, 2, 3).reshape(32, 3200, 3)).save(file, "webp", lossless=True, exact=True)
        arrays[f"{split}_webp{number}"] = np.frombuffer(file.getvalue(), np.uint8)
    return arrays


def test_packed_mosaics(tmp_path, images):
    train, test = ((images(n, 3, 32, 32), np.arange(n) % 10) for n in (130, 110))
    np.savez(tmp_path / "cifar10_train.npz", **mosaics(train[0], "train", train[1]))
    with pytest.raises(UserError, match=r"cifar10_test.npz is missing"):
        load("cifar10", tmp_path)
    np.savez(tmp_path / "cifar10_test.npz", **mosaics(test[0], "test", test[1]))
    same(load("cifar10", tmp_path), train, test)


def test_packed_streams(tmp_path, gray, no_debian):
    train, test = ((x[:, None], y) for x, y in gray)
    formats.pack(tmp_path / "fashion_mnist.npz", {"train": train, "test": test})
    same(load("fmnist", tmp_path), train, test)
    (tmp_path / "fashion_mnist.npz").write_bytes(b"PK\3\4 no zip")
    with pytest.raises(UserError, match=r"fashion_mnist.npz is damaged"):
        load("fmnist", tmp_path)


def test_the_sample_of_cinic_is_named_a_sample(tmp_path, images):
    x, y = images(120, 3, 32, 32), np.repeat(np.arange(10), 12)
    np.savez(tmp_path / "cinic10_sample2000.npz", **mosaics(x, "test", y))
    report = check("cinic10", tmp_path)
    assert report["name"] == "cinic10-sample"
    assert "not the dataset" in report["format"]
    assert report["train_class_counts"] == report["test_class_counts"] == [6] * 10


def test_the_built_in_dataset_is_unchanged():
    report = check("fmnist-mini", None)
    assert report["train_class_counts"] == [1000] * 10
    assert report["test_class_counts"] == [200] * 10
    assert report["sha256"] == "55f2e0126d3d519597154a316ccc1fe3c4de9a1218f99d5431b92b3925b83a19"
    assert np.allclose(report["measured_mean"] + report["measured_std"], report["mean"] + report["std"], atol=2e-3)
    assert (MINI.parent / "LICENSE.fashion-mnist").exists()
    assert MINI.stat().st_size < 5e6


def test_digits_come_with_scikit_learn(monkeypatch):
    pytest.importorskip("sklearn")
    report = check("digits", None)
    assert (report["train"], report["test"], report["shape"]) == (1437, 360, [1, 8, 8])
    assert max(report["test_class_counts"]) - min(report["test_class_counts"]) <= 3
    assert (report["mean"], report["std"]) == (report["measured_mean"], report["measured_std"])
    assert int(load("digits").train_x.max()) == 255
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        load("digits")


def test_names_are_checked():
    for name in (*NAMES, "custom", "hf:some/where"):
        check_name(name)
    with pytest.raises(UserError, match="unknown dataset 'cifr10': did you mean 'cifar10'"):
        check_name("cifr10")
    with pytest.raises(UserError, match="from_arrays"):
        load("custom")


def test_describe_lists_what_is_found(tmp_path, gray):
    write_idx(tmp_path / "mnist", *gray)
    rows = {row["name"]: row for row in describe(tmp_path)}
    assert list(rows) == DATASETS.names()
    assert rows["mnist"]["where"] == str(tmp_path / "mnist" / "train-images-idx3-ubyte")
    assert rows["fmnist-mini"]["format"] == "built in"
    assert not rows["cifar10"]["found"]
    assert all(row["note"] for row in rows.values())


def test_class_names_are_in_the_official_order():
    specs = {name: DATASETS.load(name) for name in NAMES}
    assert {name: spec.classes for name, spec in specs.items()} == dict.fromkeys(NAMES, 10) | {"cifar100": 100}
    assert list(CIFAR100) == sorted(set(CIFAR100))
    aquatic_mammals = {CIFAR100[label] for label in np.flatnonzero(SUPERCLASSES == 0)}
    assert aquatic_mammals == {"beaver", "dolphin", "otter", "seal", "whale"}
    vehicles = {CIFAR100[label] for label in np.flatnonzero(SUPERCLASSES == 19)}
    assert vehicles == {"lawn_mower", "rocket", "streetcar", "tank", "tractor"}
    assert load("fmnist-mini").class_names[9] == "Ankle boot"

"""Files that are damaged or made to harm: each is refused with one line."""

import gzip
import io
import lzma
import pickle
import pickletools
import tarfile
import zipfile

import numpy as np
import pytest
from official_files import cifar_files, idx_bytes, python2_pickle, write_files, write_idx
from PIL import Image

from dynafed.data import DatasetSpec, Format, formats, load
from dynafed.data.cifar_pickle import read_batch
from dynafed.errors import UserError

FILES = (["py/train"], ["py/test"])


@pytest.fixture
def tiny(register):
    """Registers a dataset of 6 samples, which may unpack to about 1.1 MB, in the given format."""

    def add(read, marker, shape=(3, 32, 32)):
        form = Format("tiny", read, markers=(marker,))
        register("tiny", DatasetSpec("tiny", tuple("0123456789"), shape, 4, 2, (form,)))

    return add


def refused(folder, words=r"unpacks to more than 1,\d{3},\d{3} bytes"):
    with pytest.raises(UserError, match=words) as caught:
        load("tiny", folder)
    assert "\n" not in str(caught.value)


def python_batch(images, count=2):
    x, y = images(count, 3, 32, 32), np.arange(count)
    return x, y, cifar_files("cifar10", {"batch": (x, y)}, python2_pickle)["batch"]


def test_a_batch_is_read_in_either_order_of_its_array(images):
    x, y, data = python_batch(images, 3)
    pixels, labels = read_batch(data, "labels")
    assert np.array_equal(pixels, x.reshape(3, -1))
    assert np.array_equal(labels, y)
    columns = python2_pickle({"data": np.asfortranarray(x.reshape(3, -1)), "labels": [1, 2, 3]})
    assert np.array_equal(read_batch(columns, "labels")[0], x.reshape(3, -1))
    assert columns.index(x.reshape(3, -1).tobytes("F"))


def test_mutated_batches_are_read_or_refused(tmp_path, images, rng, tiny, monkeypatch):
    tiny(lambda path, size: formats.cifar_python(path, size, files=FILES, label_key="labels"), "py")
    data = python_batch(images)[2]
    content = {"train": data, "test": data}
    write_files(tmp_path, "py", content)
    monkeypatch.setattr(formats, "_content", lambda path, budget: content[path.name])  # no time for 4,000 files
    start = data.index(b"cnumpy.core") - 60
    pixels = range(data.index(b"\x89T") + 6, data.index(b"\x89T") + 6 + 2 * 3072)
    structure = np.array([place for place in range(len(data)) if place not in pixels])
    opcodes = np.frombuffer("".join(opcode.code for opcode in pickletools.opcodes).encode("latin-1"), np.uint8)
    outcomes = []
    for number in range(4000):
        mutated = bytearray(data)
        for place in rng.choice(structure, rng.integers(1, 4)):
            place = min(place, len(mutated) - 1)
            match rng.integers(4):
                case 0:
                    mutated[place : place + 1] = rng.bytes(rng.integers(0, 4))
                case 1:
                    mutated[place] = rng.choice(opcodes)
                case 2:
                    mutated[place] ^= 1 << rng.integers(8)
                case 3:
                    source = rng.integers(start, len(data))
                    mutated[place:place] = data[source : source + rng.integers(1, 40)]
        if number % 10 == 0:
            mutated = mutated[: rng.integers(len(mutated))]
        content["train"] = bytes(mutated)
        try:
            outcomes.append(load("tiny", tmp_path).train_x.shape[1:] == (3, 32, 32))
        except UserError as error:
            outcomes.append(False if "\n" in str(error) else None)
    assert outcomes.count(None) > 2000
    assert outcomes.count(True) > 50
    assert False not in outcomes


NESTED = b"\x80\x02K\x00" + b"\x85" * 900 + b"."
BAD_BATCHES = {
    "deep tuple": (NESTED, "tuple that no CIFAR"),
    "long tuple": (b"\x80\x02(" + b"N" * 9 + b"t.", "tuple of 9 items"),
    "many opcodes": (b"\x80\x02" + b"N" * 5000 + b".", "more than 1019 opcodes"),
    "list in itself": (b"\x80\x02]q\x01h\x01a.", "list of other than"),
    "list as key": (b"\x80\x02}]K\x00s.", "other keys than texts"),
    "dict in dict": (b"\x80\x02}U\x01a}s.", "dict in a dict"),
    "no dict": (b"\x80\x02K\x00.", "isn't one dict"),
    "no array": (b"\x80\x02}.", "lacks the array 'data'"),
    "other opcode": (pickle.dumps({"a": 1.5}, protocol=2), r"opcode b'X'"),
    "array never built": (b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n", "isn't one dict"),
    "empty": (b"", "isn't one dict"),
}


@pytest.mark.parametrize(("data", "words"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_a_batch_that_is_not_like_the_official_ones_is_refused(tmp_path, tiny, data, words):
    tiny(lambda path, size: formats.cifar_python(path, size, files=FILES, label_key="labels"), "py")
    write_files(tmp_path, "py", {"train": data, "test": data})
    refused(tmp_path, f"py is damaged.*{words}")


ZEROS = bytes(2_000_000)


@pytest.mark.parametrize("zipped", ["", "all"])
def test_idx_files_are_bounded(tmp_path, tiny, zipped):
    tiny(formats.idx, "tiny/train-images-idx3-ubyte.gz" if zipped else "tiny/train-images-idx3-ubyte", (1, 28, 28))
    labels = np.zeros(2, int)
    write_idx(tmp_path / "tiny", (np.zeros((2, 28, 28)), labels), (np.zeros((2600, 28, 28)), labels), zipped)
    refused(tmp_path)
    write_idx(tmp_path / "tiny", (np.zeros((2, 28, 28)), labels), (np.zeros((2, 28, 28)), labels), zipped)
    assert len(load("tiny", tmp_path).train_y) == 2


def test_a_file_that_was_unpacked_under_its_old_name_is_read(tmp_path, tiny):
    tiny(formats.idx, "tiny/train-images-idx3-ubyte.gz", (1, 28, 28))
    (tmp_path / "tiny").mkdir()
    for stem in ("train", "t10k"):
        (tmp_path / "tiny" / f"{stem}-images-idx3-ubyte.gz").write_bytes(idx_bytes(np.zeros((2, 28, 28))))
        (tmp_path / "tiny" / f"{stem}-labels-idx1-ubyte.gz").write_bytes(idx_bytes(np.zeros(2)))
    assert len(load("tiny", tmp_path).train_y) == 2


def binary(path, max_bytes):
    return formats.cifar_binary(path, max_bytes, files=(["bin/train"], ["bin/test"]), label_bytes=1)


@pytest.mark.parametrize(
    "files", [{"train": ZEROS}, {"unwanted": ZEROS}, {"unwanted/one": ZEROS[::2], "two": ZEROS[::2]}]
)
def test_tars_are_bounded_as_a_whole(tmp_path, tiny, files):
    tiny(binary, "tiny.tar.gz")
    record = bytes(3073)
    write_files(tmp_path / "tiny.tar.gz", "bin", {**files, "test": record, "train2": record})
    refused(tmp_path)
    if "train" in files:
        write_files(tmp_path, "bin", files)
        tiny(binary, "bin")
        refused(tmp_path)


def test_sparse_and_oversized_tar_members_are_refused(tmp_path, tiny):
    tiny(binary, "tiny.tar.gz")
    for kind in (tarfile.GNUTYPE_SPARSE, tarfile.REGTYPE):
        info = tarfile.TarInfo("bin/train")
        info.size, info.type = 2**40, kind
        header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
        (tmp_path / "tiny.tar.gz").write_bytes(gzip.compress(bytes(header) + ZEROS))
        refused(tmp_path, "unpacks to more than|lacks|damaged")


def png(side):
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize("files", [{"train/a/0.png": 700}, {f"train/a/{number}.png": 300 for number in range(5)}])
def test_images_are_bounded_by_their_pixels(tmp_path, tiny, files):
    def read(path, max_bytes):
        return formats.image_files(path, max_bytes, class_names=("a", "b"))

    tiny(read, "tiny")
    write_files(tmp_path / "tiny", "", {name: png(side) for name, side in files.items()})
    refused(tmp_path)


def write_npz(path, compression=zipfile.ZIP_STORED, **arrays):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array)
            file.writestr(f"{name}.npy", member.getvalue())


def split_arrays(raw, shape):
    stream = np.frombuffer(lzma.compress(raw), np.uint8)
    arrays = {"xz": stream, "shape": np.array(shape), "labels": np.zeros(shape[0], np.uint8)}
    return {f"{split}_{name}": array for split in ("train", "test") for name, array in arrays.items()}


def test_packed_files_are_bounded(tmp_path, tiny):
    tiny(formats.packed, "tiny.npz", (1, 2, 2))
    path = tmp_path / "tiny.npz"
    good = split_arrays(bytes(8), (2, 2, 2, 1))
    write_npz(path, **good)
    assert load("tiny", tmp_path).shape == (1, 2, 2)
    write_npz(path, zipfile.ZIP_DEFLATED, **good | {"train_labels": np.zeros(10**7, np.uint8)})
    refused(tmp_path)
    write_npz(path, **split_arrays(ZEROS, (500, 2000, 2, 1)))
    refused(tmp_path)
    write_npz(path, zipfile.ZIP_LZMA, **good)
    refused(tmp_path, "in a way that numpy doesn't use")
    for change in (
        {"train_xz": split_arrays(ZEROS, (2,))["train_xz"]},
        {"train_shape": np.array([-2, 2, 2, 1])},
        {"train_labels": np.zeros(2)},
        {"train_labels": np.array([None, None])},
    ):
        write_npz(path, **good | change)
        refused(tmp_path, "tiny.npz (is damaged|has labels of type float64)")


def test_a_zip_that_lies_about_its_sizes_is_refused(tmp_path, tiny):
    tiny(formats.packed, "tiny.npz", (1, 2, 2))
    path = tmp_path / "tiny.npz"
    labels = np.zeros(10**6, np.uint8)
    write_npz(path, zipfile.ZIP_DEFLATED, **split_arrays(bytes(8), (2, 2, 2, 1)) | {"train_labels": labels})
    size = (10**6 + 128).to_bytes(4, "little")
    assert path.read_bytes().count(size) == 2
    path.write_bytes(path.read_bytes().replace(size, (130).to_bytes(4, "little")))
    refused(tmp_path, "tiny.npz is damaged")

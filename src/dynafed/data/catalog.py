"""The built-in datasets, one record each."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from dynafed.data import formats
from dynafed.data.formats import Array, Splits
from dynafed.data.partition import carve
from dynafed.data.spec import Checksums, DatasetSpec, Download, Format

MINI = Path(__file__).with_name("builtin") / "fmnist-mini.npz"

DIGITS = tuple("0123456789")
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100 = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905
)
SUPERCLASSES = np.frombuffer(
    b"eboiaghhsddojshldjhlglfkhgnpdpalbkmoqjlfftiipnorskqerecaresrkdcmmqmbjtckabqmjnpnqtcegtffitsbcpgarion", np.uint8
) - ord("a")
"""CIFAR-100's superclass of each class (a is 0), which the binary files store before the class."""


def _under(folders: tuple[str, ...], *files: str) -> tuple[str, ...]:
    return tuple(str(Path(folder, file)) for folder in folders for file in files)


def _idx_markers(*folders: str) -> tuple[str, ...]:
    return _under(folders, "train-images-idx3-ubyte", "train-images-idx3-ubyte.gz")


def _fixed_split(x: Array, y: Array, held: int, purpose: str) -> Splits:
    """The same split in every run, for samples that have no official one."""
    from dynafed.seeds import Seeds  # imports torch, which the records don't need

    train, test = carve(y, held, Seeds(0).rng(purpose))
    return (x[train], y[train]), (x[test], y[test])


def _digits(_path: Path, _max_bytes: int) -> Splits:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    return _fixed_split(images, bunch.target.astype(np.int64), 360, "digits")


def _cinic_sample(path: Path, max_bytes: int) -> Splits:
    x, y = formats.packed_split(path, max_bytes, "test")
    return _fixed_split(x, y, len(y) // 2, "cinic10-sample")


def _cifar(
    name: str, binary: str, python: str, files: formats.FileNames, label_bytes: int, label_key: str
) -> tuple[Format, ...]:
    def inside(folder: str, suffix: str) -> formats.FileNames:
        train, test = ([f"{folder}/{file}{suffix}" for file in split] for split in files)
        return train, test

    folders, number = ("", name, name.upper()), name.removeprefix("cifar")
    return (
        Format(
            "official binary version",
            partial(formats.cifar_binary, files=inside(binary, ".bin"), label_bytes=label_bytes),
            _under(folders, binary, f"cifar-{number}-binary.tar.gz"),
        ),
        Format(
            "official Python version",
            partial(formats.cifar_python, files=inside(python, ""), label_key=label_key),
            _under(folders, python, f"cifar-{number}-python.tar.gz"),
        ),
        Format("packed", formats.packed, _under(folders, f"{name}_train.npz")),
    )


def _cinic_folder(path: Path, max_bytes: int) -> Splits:
    return _cinic(path.parents[1], max_bytes)


_cinic = partial(formats.image_files, class_names=CIFAR10)
_fashion_mnist = partial(
    DatasetSpec,
    class_names=FASHION,
    shape=(1, 28, 28),
    mean=(0.2860,),
    std=(0.3530,),
    license_name="MIT, (c) 2017 Zalando SE",
    citation="Xiao, Rasul and Vollgraf 2017",
)
_CINIC = ("cinic10", "CINIC10", "cinic-10", "CINIC-10")

_RECORDS = (
    _fashion_mnist(
        name="fmnist-mini",
        train=10_000,
        test=2_000,
        formats=(Format("built in", formats.packed, (str(MINI),)),),
        note="a part of FashionMNIST, built in",
    ),
    DatasetSpec(
        name="digits",
        class_names=DIGITS,
        shape=(1, 8, 8),
        train=1_437,
        test=360,
        mean=(0.3057,),
        std=(0.3762,),
        formats=(Format("scikit-learn", _digits, module="sklearn"),),
        note="comes with scikit-learn",
        license_name="CC BY 4.0",
        citation="Alpaydin and Kaynak 1998",
    ),
    _fashion_mnist(
        name="fmnist",
        train=60_000,
        test=10_000,
        formats=(
            Format(
                "IDX files",
                formats.idx,
                _idx_markers("fmnist", "FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "fashion_mnist"),
            ),
            Format("packed", formats.packed, _under(("", "fmnist"), "fashion_mnist.npz")),
            Format("IDX files (Debian)", formats.idx, _idx_markers("/usr/share/datasets/fashion-mnist")),
        ),
        download=Download(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            {
                "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
                "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
                "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
            },
        ),
        checksums=Checksums(
            "md5",
            (
                "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "9018921c3c673c538a1fc5bad174d6f9",
                "8181f5470baa50b63fa0f6fddb340f0a",
                "15d484375f8d13e6eb1aabb0c3f46965",
            ),
            formats.idx_contents,
        ),
    ),
    DatasetSpec(
        name="mnist",
        class_names=DIGITS,
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        mean=(0.1307,),
        std=(0.3081,),
        formats=(Format("IDX files", formats.idx, _idx_markers("mnist", "MNIST/raw", "MNIST")),),
        download=Download(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            {
                "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
                "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
                "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
            },
        ),
        checksums=Checksums(
            "md5",
            (
                "6bbc9ace898e44ae57da46a324031adb",
                "a25bea736e30d166cdddb491f175f624",
                "2646ac647ad5339dbf082846283269ea",
                "27ae3e4e09519cfbb04c329615203637",
            ),
            formats.idx_contents,
        ),
        license_name="no license stated",
        citation="LeCun, Bottou, Bengio and Haffner 1998",
    ),
    DatasetSpec(
        name="cifar10",
        class_names=CIFAR10,
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        formats=_cifar(
            "cifar10",
            "cifar-10-batches-bin",
            "cifar-10-batches-py",
            ([f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]),
            1,
            "labels",
        ),
        download=Download(
            "https://www.cs.toronto.edu/~kriz/", {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}
        ),
        checksums=Checksums(
            "sha1",
            (
                "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
                "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
                "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
                "aab85764eb3584312d3c7f65fd2fd016e36a258e",
                "26e2849e66a845b7f1e4614ae70f4889ae604628",
                "67eb016db431130d61cd03c7ad570b013799c88c",
            ),
            partial(formats.cifar_contents, per_file=10_000),
        ),
        license_name="no license stated",
        citation="Krizhevsky 2009",
    ),
    DatasetSpec(
        name="cifar100",
        class_names=CIFAR100,
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        formats=_cifar("cifar100", "cifar-100-binary", "cifar-100-python", (["train"], ["test"]), 2, "fine_labels"),
        download=Download(
            "https://www.cs.toronto.edu/~kriz/", {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"}
        ),
        checksums=Checksums(
            "sha1",
            ("e207cd2e05b73b1393c74c7f5e7bea451d63e08e", "8fb6623e830365ff53cf14adec797474f5478006"),
            partial(formats.cifar_contents, per_file=50_000, superclasses=SUPERCLASSES),
        ),
        license_name="no license stated",
        citation="Krizhevsky 2009",
    ),
    DatasetSpec(
        name="cinic10",
        class_names=CIFAR10,
        shape=(3, 32, 32),
        train=90_000,
        test=90_000,
        mean=(0.4789, 0.4723, 0.4305),
        std=(0.2421, 0.2383, 0.2587),
        formats=(
            Format("image files", _cinic_folder, _under(_CINIC, "train/airplane")),
            Format("official archive", _cinic, _under(("", *_CINIC), "CINIC-10.tar.gz")),
            Format(
                "packed sample of 2,000, not the dataset",
                _cinic_sample,
                _under(("", *_CINIC), "cinic10_sample2000.npz"),
                suffix="-sample",
                sizes=(1000, 1000),
            ),
        ),
        download=Download(
            "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/",
            {"CINIC-10.tar.gz": "6ee4d0c996905fe93221de577967a372"},
        ),
        note="train and test splits, valid unused",
        license_name="CC BY 4.0",
        citation="Darlow, Crowley, Antoniou and Storkey 2018",
    ),
)

BUILTIN: dict[str, DatasetSpec] = {spec.name: spec for spec in _RECORDS}
"""The built-in datasets by name."""

NAMES = tuple(BUILTIN)

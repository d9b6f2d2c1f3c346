"""What server and clients agree on: the network, and who has which data. Put your own in their place."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from dynafed.data import Dataset, load

SHAPE, CLASSES = (1, 28, 28), 10


class Net(nn.Sequential):
    """A small classifier of images."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, CLASSES))


@cache
def images() -> Dataset:
    """All the images, read once."""
    return load("fmnist-mini")


def client_data(partition: int, partitions: int, most: int = 200) -> tuple[Tensor, Tensor]:
    """One client's images and labels. The clients' data are nothing alike: of ten clients, each has one class."""
    dataset = images()
    rows = torch.argsort(dataset.train_y, stable=True).tensor_split(partitions)[partition]
    rows = rows[:: -(-len(rows) // most)]
    return dataset.normalize(dataset.train_x[rows]), dataset.train_y[rows]


def test_data() -> tuple[Tensor, Tensor]:
    """The images that accuracy is measured on."""
    dataset = images()
    return dataset.normalize(dataset.test_x), dataset.test_y

"""A dataset in memory, made from any arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynafed.data.schema import Schema, sample_tensor
from dynafed.data.targets import Label, find_classes, label_array, number_targets, settle_classes
from dynafed.errors import UserError

READY_BYTES = 2**30
"""Training samples that need more memory than this are normalized whenever they are used."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and labels of both splits.

    Images are uint8 (N, C, H, W), other samples float32 or int64 (N, ...); labels are class numbers, int64 (N,). `mean`
    and `std` are those of uint8 samples on a scale of 0 to 1, per channel of images. `class_names` is empty if the
    classes have no names.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    class_names: tuple[str, ...] = ()
    labels: tuple[Label, ...] = ()
    """The label of each class, as it was given; empty if they are 0, 1, 2, ..."""
    targets: str = "classes"
    """What is learned; with others than classes, y is float32 (N, classes), and `flat` if it was given as (N,)."""
    flat: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.train_x.shape[1:])

    @cached_property
    def schema(self) -> Schema:
        """What the samples look like."""
        dtype = self.train_x.dtype
        mean, std = (self.mean, self.std) if dtype == torch.uint8 else ((), ())
        names = self.class_names or tuple(str(label) for label in self.labels)
        form = self.targets, self.targets != "classes" and self.flat
        return Schema(self.name, self.shape, dtype, self.classes, mean, std, names, self.labels, *form)

    def with_floats(self) -> Dataset:
        """The same with whole numbers as float32, for networks that don't take them."""
        if self.train_x.dtype != torch.int64:
            return self
        return replace(self, train_x=self.train_x.float(), test_x=self.test_x.float())

    def normalize(self, x: Tensor) -> Tensor:
        """The input of a model: uint8 samples as float32 of mean 0 and standard deviation 1, floats unchanged."""
        return self.schema.normalize(x)

    @cached_property
    def ready(self) -> Tensor:
        """The training samples, normalized if that takes at most `READY_BYTES`; else as they are."""
        return self.normalize(self.train_x) if 4 * self.train_x.numel() <= READY_BYTES else self.train_x


def from_arrays(
    train: tuple[Any, Any],
    test: tuple[Any, Any],
    name: str = "custom",
    *,
    classes: int | Sequence[Any] | None = None,
    renumber: bool = True,
    targets: str = "classes",
) -> Dataset:
    """The dataset of two `(x, y)` pairs of tensors or arrays, whose memory it may share; mean and std are measured.

    Labels are whole numbers or texts; `classes` says how many there are, or names them in order. Unless `renumber` is
    False, texts and labels from 1 are numbered from 0. With other `targets` than classes, y is (N,) or (N, K).
    """
    (train_x, train_y), (test_x, test_y) = _pair("train", train), _pair("test", test)
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype != test_x.dtype:
        raise UserError(
            f"a training sample is {train_x.dtype} of shape {tuple(train_x.shape[1:])}, "
            f"but a test sample {test_x.dtype} of shape {tuple(test_x.shape[1:])}: make them alike"
        )
    mean, std = measure(train_x)
    labels: tuple[Label, ...] = ()
    if targets == "classes":
        found = label_array(train_y, "train"), label_array(test_y, "test")
        number, labels = settle_classes(classes, found, "y") if renumber else find_classes(found, "y", renumber=False)
    else:
        number = number_targets(train_y, None, targets, "train").shape[1]
    layout = Schema(name, tuple(train_x.shape[1:]), train_x.dtype, number, labels=labels, targets=targets)
    return Dataset(
        name,
        train_x,
        layout.stored_y(train_y, len(train_x), "train"),
        test_x,
        layout.stored_y(test_y, len(test_x), "test"),
        number,
        mean,
        tuple(value or 1.0 for value in std),
        labels=labels,
        targets=targets,
        flat=np.ndim(train_y) == 1,
    )


def measure(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of uint8 samples on a scale of 0 to 1, per channel of images; empty for floats."""
    if x.dtype != torch.uint8:
        return (), ()
    channels = x.transpose(0, 1) if x.ndim == 4 else x[None]
    histograms = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in channels]).double()
    share = histograms / histograms.sum(dim=1, keepdim=True)
    values = torch.arange(256).double() / 255
    mean = share @ values
    variance = (share * (values - mean[:, None]) ** 2).sum(dim=1)
    return tuple(mean.tolist()), tuple(variance.sqrt().tolist())


def _pair(split: str, pair: tuple[Any, Any]) -> tuple[Tensor, Any]:
    try:
        x, y = pair
    except (TypeError, ValueError) as error:
        raise UserError(f"{split} must be a pair (x, y) of arrays: {error}") from None
    return sample_tensor(x, split), y

"""A dataset in memory, made from any arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynafed.data.schema import Schema
from dynafed.errors import UserError

READY_BYTES = 2**30
"""Training samples that need more memory than this are normalized whenever they are used."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and labels of both splits.

    Images are uint8 (N, C, H, W), other samples float32 (N, ...); labels are int64 (N,). `mean` and `std` are those of
    uint8 samples on a scale of 0 to 1, per channel of images. `class_names` is empty if the classes have no names.
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

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.train_x.shape[1:])

    @cached_property
    def schema(self) -> Schema:
        """What the samples look like."""
        dtype = self.train_x.dtype
        return Schema(self.name, self.shape, dtype, self.classes, self.mean, self.std, self.class_names)

    def normalize(self, x: Tensor) -> Tensor:
        """The input of a model: uint8 samples as float32 of mean 0 and standard deviation 1, floats unchanged."""
        return self.schema.normalize(x)

    @cached_property
    def ready(self) -> Tensor:
        """The training samples, normalized if that takes at most `READY_BYTES`; else as they are."""
        return self.normalize(self.train_x) if 4 * self.train_x.numel() <= READY_BYTES else self.train_x


def from_arrays(train: tuple[Any, Any], test: tuple[Any, Any], name: str = "custom") -> Dataset:
    """The dataset of two `(x, y)` pairs of tensors or arrays, whose memory it may share; mean and std are measured."""
    (train_x, train_y), (test_x, test_y) = _pair("train", train), _pair("test", test)
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype != test_x.dtype:
        raise UserError(
            f"a training sample is {train_x.dtype} of shape {tuple(train_x.shape[1:])}, "
            f"but a test sample {test_x.dtype} of shape {tuple(test_x.shape[1:])}: make them alike"
        )
    mean, std = measure(train_x)
    classes = int(max(train_y.max(), test_y.max())) + 1
    distinct = len(torch.unique(train_y))
    if classes > 1000 + 10 * distinct:
        raise UserError(
            f"labels go up to {classes - 1}, but only {distinct} of them occur: number them from 0, for instance with "
            "np.unique(y, return_inverse=True)"
        )
    return Dataset(name, train_x, train_y, test_x, test_y, classes, mean, tuple(value or 1.0 for value in std))


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


def _pair(split: str, pair: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
    try:
        x, y = map(_tensor, pair)
    except (TypeError, ValueError) as error:
        raise UserError(f"{split} must be a pair (x, y) of numeric arrays: {error}") from None
    if x.ndim < 2 or not x.numel():
        raise UserError(f"{split} x has shape {tuple(x.shape)}: it needs at least one sample, and a row for each")
    if y.shape != x.shape[:1]:
        raise UserError(
            f"{split} y has shape {tuple(y.shape)}, but there are {len(x)} samples: give one label for each"
        )
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise UserError(f"{split} y is {y.dtype}: labels must be whole numbers from 0")
    if y.min() < 0:
        raise UserError(f"{split} y has the label {y.min()}: labels must be whole numbers from 0")
    if x.is_complex():
        raise UserError(f"{split} x is {x.dtype}: samples must be real numbers")
    if x.dtype != torch.uint8:
        x = x.float()
        if not x.isfinite().all():
            raise UserError(f"{split} x has values that are infinite or not a number: clean them first")
    return x, y.long()


def _tensor(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        return tensor.long() if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64) else tensor
    array = np.asarray(values)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return torch.from_numpy(array if array.flags.writeable and min(array.strides, default=1) >= 0 else array.copy())

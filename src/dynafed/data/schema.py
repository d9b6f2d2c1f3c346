"""What the samples of a federation look like: what its server and all of its clients must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynafed.data.targets import Label, decode_labels, encode_labels, label_array, number_targets
from dynafed.errors import UserError

Samples = tuple[Tensor, Tensor]
"""Samples (N, *shape) and their labels (N,)."""


@dataclass(frozen=True)
class Schema:
    """Shape, type and classes of the samples, and how they become a network's input. It holds no samples.

    `mean` and `std` are those of uint8 samples on a scale of 0 to 1, per channel of images; of float samples, if they
    are given, per feature. `class_names` is empty if the classes have no names.
    """

    name: str
    """Of the dataset."""
    shape: tuple[int, ...]
    """Of one sample."""
    dtype: torch.dtype
    """As the samples are stored: uint8, which is normalized, float32, or int64, which stays as it is."""
    classes: int
    """Or how many labels or numbers: a network has so many outputs."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    class_names: tuple[str, ...] = ()
    labels: tuple[Label, ...] = ()
    """The label of each class, as it was given; empty if they are 0, 1, 2, ..."""
    targets: str = "classes"
    """What is learned: one of the "classes"; any of so many "labels", each 0 or 1; so many "numbers"."""
    flat: bool = False
    """Whether there is one number a sample, given as (N,)."""

    def normalize(self, x: Tensor) -> Tensor:
        """The input of a model: samples of the stored type as float32 of mean 0 and standard deviation 1.

        Without `mean`, and if they are of another type because they are normalized already, they stay unchanged.
        """
        if x.dtype != self.dtype or not self.mean:
            return x
        scale, shift = self._affine
        scaled = x.float().mul_(scale.to(x.device)) if x.dtype == torch.uint8 else x * scale.to(x.device)
        return scaled.add_(shift.to(x.device))

    def to_input(self, samples: Samples, device: torch.device) -> Samples:
        """Stored samples as a network takes them, and their labels, both on `device`."""
        x, y = samples
        return self.normalize(x.to(device)), y.to(device)

    def stored(self, x: Any, y: Any, where: str) -> Samples:
        """Samples and labels from what somebody gave, as they are stored; refused if they don't fit."""
        return self.stored_x(x, where), self.stored_y(y, len(x), where)

    def stored_x(self, x: Any, where: str) -> Tensor:
        """The samples alone."""
        found = sample_tensor(x, where)
        if self.dtype == torch.float32 and found.dtype == torch.int64:
            found = found.float()
        if found.dtype != self.dtype or tuple(found.shape[1:]) != self.shape:
            raise UserError(
                f"{where} has {_name(found.dtype)} samples of shape {tuple(found.shape[1:])}, but those of "
                f"{self.name} are {_name(self.dtype)} of shape {self.shape}"
            )
        return found

    def stored_y(self, y: Any, count: int, where: str) -> Tensor:
        """The class numbers of labels, int64 (N,); other targets as float32 (N, classes)."""
        if self.targets != "classes":
            return number_targets(y, (count, self.classes), self.targets, where)
        labels = label_array(y, where)
        if len(labels) != count:
            raise UserError(f"{where} has {len(labels)} labels for {count} samples: give one label for each")
        return encode_labels(labels, self.classes, self.labels, where)

    def predictions(self, outputs: Tensor) -> np.ndarray:
        """What a network's outputs (N, classes) say, in the form in which targets were given."""
        if self.targets == "classes":
            return self.decode(outputs.argmax(1))
        found = (outputs > 0).long() if self.targets == "labels" else outputs
        return (found[:, 0] if self.flat else found).cpu().numpy()

    def decode(self, numbers: Tensor) -> np.ndarray:
        """Class numbers as the labels that were given."""
        return decode_labels(numbers, self.labels)

    @cached_property
    def _affine(self) -> tuple[Tensor, Tensor]:
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        per_channel = (-1, 1, 1) if len(self.shape) == 3 else (-1,) if len(self.mean) > 1 else ()
        scale = 255 * std if self.dtype == torch.uint8 else std
        return (1 / scale).reshape(per_channel), (-mean / std).reshape(per_channel)


def sample_tensor(x: Any, where: str) -> Tensor:
    """Samples as a tensor: uint8 stays, other whole numbers become int64, all else float32; refused if not finite."""
    try:
        found = as_tensor(x)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} x must be a numeric array: {error}") from None
    if found.ndim < 2 or not found.numel():
        raise UserError(f"{where} x has shape {tuple(found.shape)}: it needs at least one sample, and a row for each")
    if found.is_complex():
        raise UserError(f"{where} x is {found.dtype}: samples must be real numbers")
    if found.dtype == torch.uint8:
        return found
    if not found.is_floating_point() and found.dtype != torch.bool:
        return found.long()
    found = found.float()
    if not found.isfinite().all():
        raise UserError(f"{where} x has values that are infinite or not a number: clean them first")
    return found


def as_tensor(values: Any) -> Tensor:
    """An array or tensor as a tensor on the CPU, whose memory it may share."""
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        return tensor.long() if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64) else tensor
    array = np.asarray(values)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return torch.from_numpy(array if array.flags.writeable and min(array.strides, default=1) >= 0 else array.copy())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

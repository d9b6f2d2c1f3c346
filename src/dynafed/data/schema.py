"""What the samples of a federation look like: what its server and all of its clients must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Samples = tuple[Tensor, Tensor]
"""Samples (N, *shape) and their labels (N,)."""


@dataclass(frozen=True)
class Schema:
    """Shape, type and classes of the samples, and how they become a network's input. It holds no samples.

    `mean` and `std` are those of uint8 samples on a scale of 0 to 1, per channel of images. `class_names` is empty if
    the classes have no names.
    """

    name: str
    """Of the dataset."""
    shape: tuple[int, ...]
    """Of one sample."""
    dtype: torch.dtype
    """As the samples are stored: uint8, which is normalized, or float32."""
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    class_names: tuple[str, ...] = ()

    def normalize(self, x: Tensor) -> Tensor:
        """The input of a model: uint8 samples as float32 of mean 0 and standard deviation 1, floats unchanged."""
        if x.dtype != torch.uint8:
            return x
        scale, shift = self._affine
        return x.float().mul_(scale.to(x.device)).add_(shift.to(x.device))

    def to_input(self, samples: Samples, device: torch.device) -> Samples:
        """Stored samples as a network takes them, and their labels, both on `device`."""
        x, y = samples
        return self.normalize(x.to(device)), y.to(device)

    @cached_property
    def _affine(self) -> tuple[Tensor, Tensor]:
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        per_channel = (-1, 1, 1) if len(self.shape) == 3 else ()
        return (1 / (255 * std)).reshape(per_channel), (-mean / std).reshape(per_channel)

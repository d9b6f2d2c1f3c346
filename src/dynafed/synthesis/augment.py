"""Differentiable siamese augmentation: one random operation per call, with a random strength for each sample.

Zhao and Bilen, Dataset Condensation with Differentiable Siamese Augmentation, ICML 2021.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

OPERATIONS = ("color", "crop", "cutout", "flip", "scale", "rotate")


def augment(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Apply one random operation to a batch of images (N, C, H, W); any other input is returned as it is."""
    if x.ndim != 4:
        return x
    return _APPLY[OPERATIONS[rng.integers(len(OPERATIONS))]](x, rng)


def color(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Change brightness, saturation and contrast."""
    x = x + _per_sample(x, rng, -0.5, 0.5)
    gray = x.mean(dim=1, keepdim=True)
    x = gray + (x - gray) * _per_sample(x, rng, 0.0, 2.0)
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    return mean + (x - mean) * _per_sample(x, rng, 0.5, 1.5)


def crop(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Shift by up to an eighth of the side, padded with zeros."""
    height, width = x.shape[2:]
    limits = (height // 8, width // 8)
    padded = F.pad(x, (limits[1], limits[1], limits[0], limits[0]))
    down, right = (torch.from_numpy(rng.integers(0, 2 * limit + 1, len(x))).to(x.device) for limit in limits)
    rows = down[:, None] + torch.arange(height, device=x.device)
    columns = right[:, None] + torch.arange(width, device=x.device)
    samples = torch.arange(len(x), device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[samples, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def cutout(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Set a square of half the side to zero, at a random position."""
    masks = []
    for side in x.shape[2:]:
        center = torch.from_numpy(rng.integers(0, side + 1, len(x))).to(x.device)
        masks.append((torch.arange(side, device=x.device) - center[:, None]).abs() <= side // 4)
    hidden = masks[0][:, None, :, None] & masks[1][:, None, None, :]
    return x * ~hidden


def flip(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Mirror half of the images, left to right."""
    mirrored = torch.from_numpy(rng.random(len(x)) < 0.5).to(x.device)
    return torch.where(mirrored[:, None, None, None], x.flip(3), x)


def scale(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Stretch each axis by a factor between 1/1.2 and 1.2."""
    across, down = (_per_sample(x, rng, 1 / 1.2, 1.2).flatten() for _ in range(2))
    zero = torch.zeros_like(across)
    return _warp(x, torch.stack((across, zero, zero, zero, down, zero), dim=1))


def rotate(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Turn by up to 15 degrees."""
    angle = torch.deg2rad(_per_sample(x, rng, -15.0, 15.0).flatten())
    zero = torch.zeros_like(angle)
    return _warp(x, torch.stack((angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero), dim=1))


_APPLY: dict[str, Callable[[Tensor, np.random.Generator], Tensor]] = {
    "color": color,
    "crop": crop,
    "cutout": cutout,
    "flip": flip,
    "scale": scale,
    "rotate": rotate,
}


def _per_sample(x: Tensor, rng: np.random.Generator, low: float, high: float) -> Tensor:
    """One uniform number for each sample, shape (N, 1, 1, 1)."""
    return torch.from_numpy(rng.uniform(low, high, (len(x), 1, 1, 1))).to(x)


def _warp(x: Tensor, matrices: Tensor) -> Tensor:
    grid = F.affine_grid(matrices.reshape(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)

"""The synthetic dataset: samples, label logits, the inner learning rate, and provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from dynafed.engine.files import write_bytes
from dynafed.errors import UserError, first_line
from dynafed.tree import Tree, seal, unseal

LARGEST = 1e6
"""No sample, logit or rate of a synthetic set is larger."""


@dataclass(frozen=True)
class SyntheticData:
    """D_syn: samples (N, *shape) with soft labels, which are the softmax of `logits` (N, classes)."""

    x: Tensor
    logits: Tensor
    inner_lr: float
    """The inner rate; the geometric mean if each parameter tensor has its own."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Config, seed, checksum of the trajectory, version."""
    inner_rates: Tensor | None = None
    """The inner rate of each trainable parameter tensor, in the model's order, if they differ; shape (tensors,)."""

    @property
    def labels(self) -> Tensor:
        """Each sample's distribution over the classes, shape (N, classes)."""
        return self.logits.softmax(dim=1)

    @property
    def lr(self) -> float | Tensor:
        """The inner rate or rates, as `matching_gradient` takes them."""
        return self.inner_lr if self.inner_rates is None else self.inner_rates

    def tree(self) -> Tree:
        """The tensors, without the provenance."""
        rates = {} if self.inner_rates is None else {"inner_rates": self.inner_rates}
        return {
            "x": self.x,
            "logits": self.logits,
            "inner_lr": torch.tensor(self.inner_lr, dtype=torch.float64),
            **rates,
        }

    @classmethod
    def from_tree(cls, tree: Tree, provenance: Mapping[str, Any] | None = None) -> SyntheticData:
        """The inverse of `tree`."""
        return cls(tree["x"], tree["logits"], float(tree["inner_lr"]), provenance or {}, tree.get("inner_rates"))

    def save(self, path: Path) -> None:
        """Write a safetensors file; its header holds the provenance."""
        write_bytes(path, seal(self.tree(), {"dynafed": json.dumps(self.provenance)}))

    @classmethod
    def load(cls, path: str | Path, shape: tuple[int, ...], classes: int) -> SyntheticData:
        """Read a file that `save` wrote; raises `UserError` if it doesn't fit this shape and number of classes."""
        try:
            tree, notes = unseal(Path(path).read_bytes())
            data = cls.from_tree(tree, json.loads(notes.get("dynafed", "{}")))
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"{path} is no synthetic set: {first_line(error)}") from None
        if not all(isinstance(t, Tensor) and t.dtype == torch.float32 for t in (data.x, data.logits)):
            raise UserError(f"{path} holds samples of {data.x.dtype} and logits of {data.logits.dtype}, not float32")
        if not (data.x.ndim and data.logits.ndim and len(data.x)):
            raise UserError(f"{path} holds no samples")
        if data.x.shape[1:] != shape or data.logits.shape != (len(data.x), classes):
            raise UserError(
                f"{path} holds samples of shape {tuple(data.x.shape[1:])} in {data.logits.shape[-1]} classes, "
                f"not {shape} in {classes}"
            )
        if not (torch.isfinite(data.x).all() and torch.isfinite(data.logits).all()):
            raise UserError(f"{path} holds NaN or infinity")
        if max(float(data.x.abs().max()), float(data.logits.abs().max()), data.inner_lr) > LARGEST:
            raise UserError(f"{path} holds numbers beyond {LARGEST:g}, which no synthesis makes")
        if not data.inner_lr > 0:
            raise UserError(f"{path} has the inner rate {data.inner_lr:g}, which must be positive")
        return data

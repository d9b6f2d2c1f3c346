"""What is learned, by the loss: one class of several, several labels at once, or numbers; and how it is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dynafed.errors import UserError, first_line
from dynafed.registry import Registry

if TYPE_CHECKING:
    from dynafed.config import Config

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Takes a network's outputs (N, K) and the targets; returns the mean loss."""

TARGETS = {"cross_entropy": "classes", "bce": "labels", "mse": "numbers"}
"""What each loss is for. What a function of the user's own is for, the targets tell: labels are classes."""

MOST_CLASSES = 256
"""With more classes than these, nobody counts which one is taken for which."""

LOSSES: Registry[LossFunction] = Registry(
    "loss",
    {
        "cross_entropy": F.cross_entropy,
        "bce": F.binary_cross_entropy_with_logits,
        "mse": F.mse_loss,
    },
)
"""Loss functions by name."""


@dataclass(frozen=True)
class Tally:
    """What a model does on some samples, in sums: those of several parts add up."""

    samples: int
    sums: Mapping[str, float]
    confusion: Tensor | None = None
    """Samples by class and by predicted class (classes, classes); None if there are no classes."""


@dataclass(frozen=True)
class Task:
    """A loss, what it is for, and the metrics that go with it."""

    loss: str = "cross_entropy"
    targets: str = "classes"
    """"classes": one label a sample. "labels": any number of labels, (N, K) of 0 and 1. "numbers": (N, K)."""
    function: LossFunction = F.cross_entropy
    """The mean loss of a batch."""

    @property
    def metric(self) -> str:
        """The one that a run is summed up by."""
        return {"classes": "accuracy", "labels": "accuracy", "numbers": "rmse"}[self.targets]

    @property
    def larger_is_better(self) -> bool:
        """Whether that metric should grow."""
        return self.metric == "accuracy"

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return self.function(outputs, y)

    def sum_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The samples' losses, added up."""
        if self.loss == "cross_entropy":
            return F.cross_entropy(outputs, y, reduction="sum")
        return self.mean_loss(outputs, y) * len(y)

    def tally(self, outputs: Tensor, y: Tensor) -> Tally:
        """Measure a batch."""
        sums = {"loss": float(self.sum_loss(outputs, y))}
        if self.targets == "classes":
            classes, predicted = outputs.shape[1], outputs.argmax(1)
            sums["correct"] = int((predicted == y).sum())
            if classes > MOST_CLASSES:
                return Tally(len(y), sums)
            cells = torch.bincount((y * classes + predicted).cpu(), minlength=classes * classes)
            return Tally(len(y), sums, cells.reshape(classes, classes))
        if self.targets == "labels":
            found, wanted = outputs > 0, y > 0.5
            sums["correct"] = float((found == wanted).double().mean(1).sum())
            sums["hits"] = int((found & wanted).sum())
            sums["misses"] = int((found != wanted).sum())
        else:
            error, wide = (outputs - y).double(), y.double()
            sums |= {"squared": float((error**2).mean(1).sum()), "absolute": float(error.abs().mean(1).sum())}
            sums |= {"targets": float(wide.sum()), "targets_squared": float((wide**2).sum()), "values": y.numel()}
        return Tally(len(y), sums)

    def metrics(self, tally: Tally) -> dict[str, float]:
        """The metrics of a tally."""
        sums, samples = tally.sums, tally.samples
        if self.targets == "classes":
            return {"accuracy": sums["correct"] / samples, "loss": sums["loss"] / samples}
        if self.targets == "labels":
            f1 = 2 * sums["hits"] / max(1, 2 * sums["hits"] + sums["misses"])
            return {"accuracy": sums["correct"] / samples, "f1": f1, "loss": sums["loss"] / samples}
        found = {"rmse": math.sqrt(sums["squared"] / samples), "mae": sums["absolute"] / samples}
        spread = sums["targets_squared"] - sums["targets"] ** 2 / sums["values"]
        if spread > 0:
            found["r2"] = 1 - sums["squared"] * sums["values"] / samples / spread
        return found | {"loss": sums["loss"] / samples}


CROSS_ENTROPY = Task()


def loss_function(config: Config, given: LossFunction | str | None = None) -> tuple[Config, LossFunction]:
    """The loss that was given in Python, or that the config names; and the config with its name."""
    if isinstance(given, str):
        config = config.replace(loss=given)
    elif given is not None:
        if not callable(given):
            raise UserError(f"loss must be a name or a function of outputs and targets, not a {type(given).__name__}")
        return config.replace(loss="custom"), given
    if config.loss == "custom":
        raise UserError("loss = 'custom' stands for a function given in Python: pass it again as loss=...")
    return config, LOSSES.load(config.loss)


def config_targets(config: Config) -> str | None:
    """What is learned, as far as the config says it; else the targets tell."""
    from dynafed.data.settings import DataSettings

    return TARGETS.get(config.loss) or config.section("data", DataSettings).targets or None


def check_loss(task: Task, outputs: Tensor) -> None:
    """Refuse a loss of the user's own that doesn't turn one sample's outputs into a number with a gradient."""
    y = torch.zeros(1, dtype=torch.int64) if task.targets == "classes" else torch.zeros(1, outputs.shape[1])
    try:
        loss = task.mean_loss(outputs.requires_grad_(), y.to(outputs.device))
    except Exception as error:  # it is the user's code: whatever it raises is what they need to know
        raise UserError(f"the loss function failed: {type(error).__name__}: {first_line(error)}") from error
    if not (isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad):
        raise UserError("the loss function must return one number, the mean loss, as a tensor with a gradient")


def add_up(tallies: Iterable[Tally]) -> Tally:
    """The tally of all parts together, added in their order."""
    samples, sums, confusion = 0, dict[str, float](), None
    for tally in tallies:
        samples += tally.samples
        sums = {name: sums.get(name, 0) + value for name, value in tally.sums.items()}
        if tally.confusion is not None:
            confusion = tally.confusion if confusion is None else confusion + tally.confusion
    return Tally(samples, sums, confusion)

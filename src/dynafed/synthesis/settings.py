"""Settings of DynaFed: the trajectory, the synthesis and the fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynafed.config import OPTIMIZERS
from dynafed.settings import build, setting

DISTANCES = ("quotient", "l2", "cosine")


@dataclass(frozen=True)
class DynaFedSettings:
    """Section `dynafed`."""

    trajectory: int = setting(20, "L: rounds that are recorded before the synthesis", low=2)
    include_initial: bool = setting(False, "whether the initial model is the trajectory's first checkpoint")
    segment: int = setting(5, "s: checkpoints from a segment's start to its end", low=1)
    targets: tuple[int, ...] = setting((2,), "how many checkpoints are averaged to a target, drawn if several", low=1)
    target_draw: str = setting(
        "distinct",
        "the target's checkpoints: distinct or with replacement among the s after the start, the segment's last, or "
        "its last ones (tail)",
        choices=("distinct", "replacement", "last", "tail"),
    )
    samples: int = setting(150, "synthetic samples", low=1)
    iterations: int = setting(1000, "N: steps of the synthesis", low=1)
    inner_steps: int = setting(20, "s': gradient steps on the synthetic samples in each iteration", low=1)
    inner_lr: float = setting(0.0, "rate of the inner steps, where it starts if it is learned (0: automatic)", low=0)
    inner_lr_rate: float = setting(
        0.03, "Adam's rate on the inner rate's logarithm (0: the inner rate is fixed)", low=0
    )
    inner_rates: str = setting(
        "scaled",
        "a single inner rate, or one for each parameter tensor (auto: with the quotient distance); scaled: one for "
        "each, and it starts in proportion to the tensor's way divided by its gradient",
        choices=("auto", "single", "tensor", "scaled"),
    )
    image_optimizer: str = setting("adam", "of the synthetic samples", choices=OPTIMIZERS)
    image_lr: float = setting(0.05, "its rate", above=0)
    learn_labels: bool = setting(True, "whether the labels are learned, too")
    label_optimizer: str = setting("adam", "of the label logits", choices=OPTIMIZERS)
    label_lr: float = setting(0.05, "its rate", above=0)
    distance: str = setting(
        "quotient",
        "from where the inner steps lead to the target: the paper's l2, or quotient, which leaves out changes without "
        "an effect on predictions",
        choices=DISTANCES,
    )
    loss_reduction: str = setting(
        "samples",
        "whether the soft-label loss is a mean over samples, or over classes, too",
        choices=("samples", "all"),
    )
    augment: bool = setting(False, "one random differentiable change at each inner and each fine-tuning step")
    finetune_optimizer: str = setting("adam", "fresh in every round", choices=OPTIMIZERS)
    finetune_lr: float = setting(3e-4, "its rate", above=0)
    finetune_steps: int = setting(50, "steps of fine-tuning in every round after the synthesis", low=0)
    finetune_batch: int = setting(0, "samples in such a step (0: all)", low=0)
    resynthesize_every: int = setting(0, "synthesize again after so many rounds, from the latest ones (0: once)", low=0)
    outlier_steps: float = setting(
        0.0,
        "leave out segments with a step so many times longer than the trajectory's median step (0: none); 4 against "
        "attackers",
        low=0,
    )
    opposing_steps: float = setting(
        0.0,
        "leave out segments with a step whose mean cosine with the other steps is so far below 0 (0: none); 0.08 "
        "against attackers",
        low=0,
        high=1,
    )
    max_matching_loss: float = setting(
        0.0, "a synthesis that matches worse is not used, and another trajectory is recorded (0: any is used)", low=0
    )
    on_refusal: str = setting(
        "record",
        "after a synthesis that isn't trusted: record the next rounds, or restart from the initial model before, once",
        choices=("record", "restart"),
    )
    evidence: bool = setting(
        False, "measure D_syn as the paper's figures do: against real samples, noise, from scratch"
    )
    synthetic: str = setting("", "a synthetic.safetensors to use instead of a synthesis")
    chunk: int = setting(0, "samples differentiated at a time (0: at most 75 for convolutions, else all)", low=0)

    @property
    def rates_per_tensor(self) -> bool:
        """Whether each parameter tensor has an inner rate of its own."""
        return self.inner_rates in ("tensor", "scaled") or (self.inner_rates == "auto" and self.distance == "quotient")

    @classmethod
    def of(cls, config: DynaFedSettings | Mapping[str, Any] | None) -> DynaFedSettings:
        """The settings as they are, or built from a dict of values that differ from the defaults."""
        return config if isinstance(config, DynaFedSettings) else build(cls, config or {}, "dynafed.")

"""What is too large to be true: an update far beyond those of the rounds before, or a step of the server."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

import torch

from dynafed import tree
from dynafed.messages import Update
from dynafed.tree import Tree

MARGIN = 100.0
"""An update may be so many times as large as the median; honest ones differ by less, however unlike their data are."""

EXAMPLES_MARGIN = 1000.0
"""A client may claim so many times the median number of examples, where these are weights."""

MIN_EXAMPLES = 10_000.0
"""So many examples may be claimed in any case: some clients have a single one, and others thousands."""

STEP_MARGIN = 100.0
"""The server may move the model by so many times what one update may: some optimizers' steps are large."""

FIRST_MARGIN = 1e6
"""Before there is a median, an update may be so many times as large as the model and a vector of ones together."""

WINDOW = 20
"""Rounds whose medians are kept."""

MODEL, EXAMPLES, COUNTS = "model", "examples", "counts/"


class NormGuard:
    """Judges the updates of one round by the norms of those that were accepted in the rounds before.

    An update has parts: the change of the model, what each method sends beside it, whole numbers apart, and the
    number of examples if that is its weight. Whole numbers, such as FedGen's label counts, are judged as that
    number is. A part is too large beyond `MARGIN` times the median, over the last rounds, of each round's median;
    or beyond `max_norm`, for the model, if that isn't 0. A change of norm 1 is never too large, nor is one that is
    no larger than the model itself. Nothing is held but norms. In a run's first round there is no median yet, and
    `contaminated_by` says afterwards whether the round can count.
    """

    def __init__(
        self,
        model: Tree,
        past: Tree | None = None,
        mode: str = "reject",
        max_norm: float = 0.0,
        weighting: str = "uniform",
    ) -> None:
        self.model, self.past = model, past or {}
        self.mode, self.max_norm, self.weighting = mode, max_norm, weighting
        self.smallest = {MODEL: 1.0 + tree.norm(tree.floats(model)), EXAMPLES: MIN_EXAMPLES}
        """Of each part: what is never too large."""
        self.accepted: dict[str, list[tuple[float, int]]] = {}
        """Of each part: norm and client of the updates accepted in this round."""

    def judge(self, update: Update, examples_known: bool = False) -> tuple[Update, str | None]:
        """The update, clipped if need be, and why it must not count, or None if it may.

        With `examples_known`, the number of examples isn't a claim, and not judged.
        """
        parts = {MODEL: tree.difference(update.model, self.model)}
        for name, extra in update.extras.items():
            parts[_extra(name)] = tree.floats(extra)
            if whole := tree.without(extra, tree.floats(extra)):
                parts[_counts(name)] = whole
        if self.weighting == "examples" and not examples_known:
            parts[EXAMPLES] = {"": torch.tensor(float(update.examples))}
        norms = {part: tree.norm(content) for part, content in parts.items()}
        limits = {part: self._limit(part, content) for part, content in parts.items()}
        large = {part: norm for part, norm in norms.items() if not norm <= limits[part]}
        for part, norm in large.items():
            if self.mode == "reject" or _counted(part) or not math.isfinite(norm):
                return update, f"{_called(part)} of norm {norm:.3g} is too large: at most {limits[part]:.3g}"
        for part, norm in norms.items():
            self.accepted.setdefault(part, []).append((min(norm, limits[part]), update.client))
        return self._clipped(update, {part: limits[part] / norm for part, norm in large.items()}), None

    @property
    def largest(self) -> int:
        """The client whose accepted update changes the model most."""
        return max(self.accepted[MODEL])[1]

    def contaminated_by(self) -> tuple[int, str] | None:
        """An accepted update that the round's own median shows to be too large: its client, and the reason.

        Only where there was no median before.
        """
        for part, norms in self.accepted.items():
            limit = max(_margin(part) * _median(norms), self.smallest[part])
            norm, client = max(norms)
            if self._auto(part) and part not in self.past and norm > limit:
                return (
                    client,
                    f"{_called(part)} of norm {norm:.3g} is too large beside the others': at most {limit:.3g}",
                )
        return None

    def check_step(self, model: Tree) -> str | None:
        """Why the server must not move the model to this one, or None if it may; call it after the last update."""
        medians = self._medians(MODEL) or [_median(self.accepted[MODEL])]
        limit = STEP_MARGIN * max(MARGIN * statistics.median_low(medians), self.smallest[MODEL])
        norm = tree.norm(tree.difference(model, self.model))
        if norm <= limit or self.mode == "accept":
            return None
        return f"a step of norm {norm:.3g} is too large: at most {limit:.3g}"

    def norms(self) -> Tree:
        """Each part's medians of the last rounds, with this one's: `past` of the next round."""
        return self.past | {
            part: torch.tensor([*self._medians(part), _median(norms)][-WINDOW:], dtype=torch.float64)
            for part, norms in self.accepted.items()
        }

    def _auto(self, part: str) -> bool:
        return self.mode != "accept" and not (part == MODEL and self.max_norm)

    def _limit(self, part: str, content: Tree) -> float:
        ones = math.sqrt(sum(tensor.numel() for tensor in content.values()))
        smallest = self.smallest.setdefault(part, MIN_EXAMPLES if _counted(part) else ones)
        if not self._auto(part):
            return math.inf if self.mode == "accept" else self.max_norm
        if part not in self.past:
            return FIRST_MARGIN * (smallest + ones)
        return max(_margin(part) * statistics.median_low(self._medians(part)), smallest)

    def _medians(self, part: str) -> list[float]:
        return self.past[part].tolist() if part in self.past else []

    def _clipped(self, update: Update, factors: Mapping[str, float]) -> Update:
        if not factors:
            return update
        model = tree.moved(self.model, update.model, factors.get(MODEL, 1.0))
        extras = {name: _scaled(extra, factors.get(_extra(name), 1.0)) for name, extra in update.extras.items()}
        return replace(update, model=model, extras=extras)


def _median(norms: list[tuple[float, int]]) -> float:
    """Of two in the middle the smaller one, so that half of the updates can't raise it."""
    return statistics.median_low(norm for norm, _ in norms)


def _scaled(content: Tree, by: float) -> Tree:
    return {name: tensor * by if tensor.is_floating_point() else tensor for name, tensor in content.items()}


def _margin(part: str) -> float:
    return EXAMPLES_MARGIN if _counted(part) else MARGIN


def _counted(part: str) -> bool:
    """Whether it is made of whole numbers, which count examples and can't be clipped."""
    return part == EXAMPLES or part.startswith(COUNTS)


def _extra(method: str) -> str:
    return f"extras/{method}"


def _counts(method: str) -> str:
    return f"{COUNTS}{method}"


def _called(part: str) -> str:
    if part == EXAMPLES:
        return "a number of examples"
    return "an update" if part == MODEL else f"what {part.partition('/')[2]} sent beside the model,"

"""Smaller updates: transforms that send less than the whole change of the model, and lose some of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dynafed.messages import Broadcast, Update
from dynafed.seeds import Seeds
from dynafed.settings import setting
from dynafed.transforms import UpdateTransform
from dynafed.tree import Tree


@dataclass(frozen=True)
class TopKSettings:
    """Section `top-k`."""

    share: float = setting(0.1, "of each tensor's numbers that are sent, those that change most", above=0, high=1)


class TopK(UpdateTransform):
    """Sends the largest changes of each tensor and their places; the others count as no change.

    What isn't sent is lost: there is no memory of it on the client.
    """

    name = "top-k"
    Settings = TopKSettings

    def encode(self, update: Update, broadcast: Broadcast, seeds: Seeds) -> Update:
        """Values and places in place of each tensor; whole numbers are sent as they are."""
        sent: Tree = {}
        for name, tensor in update.model.items():
            if not tensor.is_floating_point():
                sent[name] = tensor
                continue
            change = (tensor - broadcast.model[name]).flatten()
            count = max(1, round(self.settings.share * change.numel()))
            places = change.abs().topk(count).indices.sort().values
            sent[f"{name}/places"], sent[f"{name}/values"] = places.to(torch.int32), change[places]
        return replace(update, model=sent)

    def decode(self, update: Update, broadcast: Broadcast) -> Update:
        """The model with these changes alone."""

        def restored(name: str, start: Tensor) -> Tensor:
            if not start.is_floating_point():
                return update.model[name]
            change = torch.zeros(start.numel(), dtype=start.dtype)
            change[update.model[f"{name}/places"].long()] = update.model[f"{name}/values"]
            return start + change.view(start.shape)

        return replace(update, model={name: restored(name, start) for name, start in broadcast.model.items()})


class EightBit(UpdateTransform):
    """Sends each tensor's change in whole numbers of one byte and a scale; rounding is random, so right on average."""

    name = "8-bit"

    def encode(self, update: Update, broadcast: Broadcast, seeds: Seeds) -> Update:
        """One byte a number."""
        rng = seeds.rng("8-bit", broadcast.round, update.client)
        sent: Tree = {}
        for name, tensor in sorted(update.model.items()):
            if not tensor.is_floating_point():
                sent[name] = tensor
                continue
            change = tensor - broadcast.model[name]
            scale = change.abs().max() / 127
            steps = change.double() / scale if scale > 0 else torch.zeros_like(change).double()
            rounded = torch.floor(steps + torch.from_numpy(rng.random(tuple(steps.shape))))
            sent[f"{name}/steps"] = rounded.clamp(-127, 127).to(torch.int8)
            sent[f"{name}/scale"] = scale
        return replace(update, model=sent)

    def decode(self, update: Update, broadcast: Broadcast) -> Update:
        """The model with the rounded changes."""

        def restored(name: str, start: Tensor) -> Tensor:
            if not start.is_floating_point():
                return update.model[name]
            return start + update.model[f"{name}/steps"].to(start.dtype) * update.model[f"{name}/scale"]

        return replace(update, model={name: restored(name, start) for name, start in broadcast.model.items()})

"""Memory that two processes share, in which models lie for the other to take."""

from __future__ import annotations

import torch

from dynafed import tree
from dynafed.tree import Tree

ALIGNED = 64
"""Every tensor begins at a multiple of so many bytes."""


class Shelf:
    """Places for models of one layout. They are filled in turn; who puts must know that the place is free again."""

    def __init__(self, layout: Tree, places: int) -> None:
        spans = {name: -(-tensor.nbytes // ALIGNED) * ALIGNED for name, tensor in layout.items()}
        self.memory = torch.empty(places, sum(spans.values()), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self.places: list[Tree] = []
        for memory in self.memory:
            parts = zip(layout.items(), memory.split(list(spans.values())), strict=True)
            self.places.append(
                {name: part[: like.nbytes].view(like.dtype).view(like.shape) for (name, like), part in parts}
            )
        self.next = 0

    def put(self, model: Tree) -> int:
        """Copy a model to the next place; which one that is."""
        place, self.next = self.next, (self.next + 1) % len(self.places)
        for name, tensor in self.places[place].items():
            tensor.copy_(model[name])
        return place

    def take(self, place: int) -> Tree:
        """A copy of what is there."""
        return tree.clone(self.places[place])

"""Layers whose convolutional blocks run on our kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dynafed.kernels.build import CPP, library
from dynafed.kernels.calls import CPU
from dynafed.kernels.structure import BLOCK, block_at


class ConvBlocks(nn.Sequential):
    """The same layers as the `nn.Sequential` that it stands for, with the same names."""

    version = 0
    """Of the kernels: where there is one for the whole network that it is in, that may be trained and synthesized on it
    from 3 on, and evaluated from 4 on."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.block_starts = frozenset(index for index in range(len(layers)) if block_at(list(layers), index))

    def forward(self, x: Tensor) -> Tensor:
        """The output of the last layer."""
        if not self._can_run(x):
            plain: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
            return plain
        from dynafed.kernels.ops import block_of

        layers: list[Any] = list(self)
        index = 0
        while index < len(layers):
            if index in self.block_starts:
                x = block_of(x, *layers[index : index + 2])
                index += len(BLOCK)
            else:
                x = layers[index](x)
                index += 1
        return x

    def _can_run(self, x: Tensor) -> bool:
        """Whether the kernels can take it: the network may have been moved or sent away since it was accelerated."""
        weight = next(self.parameters())
        return x.device == weight.device == CPU and x.dtype == weight.dtype in CPP and library() is not None

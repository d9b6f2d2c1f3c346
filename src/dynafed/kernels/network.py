"""A whole ConvNet in one call: its logits, the gradient of its loss, and its Hessian times a direction."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynafed.kernels.blocks import ConvBlocks
from dynafed.kernels.build import CPP, address, function, library
from dynafed.kernels.calls import CPU, taps_of
from dynafed.kernels.ops import FEW
from dynafed.kernels.structure import BLOCK, block_at, is_plain
from dynafed.models import Classifier

GROUP = 2
"""Images that go through the network together: more leave the cache, with one the weights are read too often."""


@dataclass(frozen=True)
class ConvNet:
    """Blocks of one width on images of few channels, then one linear layer, computed as a whole."""

    names: tuple[str, ...]
    """Of its parameters: of each block four, of the linear layer two."""
    channels: int
    padding: int
    """Of the first block's convolution."""
    depth: int
    outputs: int
    eps: float
    features: int
    """That the linear layer takes."""
    classes: int

    @classmethod
    def of(cls, network: nn.Module, version: int = 3) -> ConvNet | None:
        """What a network is, if it was accelerated with at least this version and is nothing more than that."""
        blocks = network.features if type(network) is Classifier else network
        if type(blocks) is not ConvBlocks or blocks.version < version or not (is_plain(network) and is_plain(blocks)):
            return None
        layers = [*blocks, *([network.head] if isinstance(network, Classifier) else [])]
        found = [block_at(layers, start) for start in range(0, len(layers) - 2, len(BLOCK))]
        *_, flatten, head = layers
        if not found or None in found or len(layers) != len(BLOCK) * len(found) + 2 or not all(map(is_plain, layers)):
            return None
        convolutions, norms = zip(*(block[:2] for block in found if block), strict=True)
        (first, *others), outputs, eps = convolutions, convolutions[0].out_channels, norms[0].eps
        fits = (
            type(flatten) is nn.Flatten
            and (flatten.start_dim, flatten.end_dim) == (1, -1)
            and type(head) is nn.Linear
            and head.bias is not None
            and first.in_channels in FEW
            and all((conv.in_channels, conv.out_channels, conv.padding[0]) == (outputs, outputs, 1) for conv in others)
            and all(norm.eps == eps for norm in norms)
        )
        if not fits or not isinstance(head, nn.Linear):
            return None
        owners = {id(module): name for name, module in network.named_modules()}
        parts = [layer for pair in zip(convolutions, norms, strict=True) for layer in pair] + [head]
        names = tuple(f"{owners[id(layer)]}.{kind}".lstrip(".") for layer in parts for kind in ("weight", "bias"))
        padding = int(first.padding[0])
        return cls(names, first.in_channels, padding, len(found), outputs, eps, head.in_features, head.out_features)

    def fits(self, params: Mapping[str, Tensor], x: Tensor) -> bool:
        """Whether the kernel can take them."""
        if x.ndim != 4 or x.shape[1] != self.channels or len(x) == 0 or params.keys() != set(self.names):
            return False
        sides = [side + 2 * self.padding - 2 for side in x.shape[2:]]
        whole = all(side > 0 and side % 2**self.depth == 0 for side in sides)
        same = all(tensor.device == x.device == CPU and tensor.dtype == x.dtype for tensor in params.values())
        features = self.outputs * (sides[0] >> self.depth) * (sides[1] >> self.depth)
        return whole and same and x.dtype in CPP and features == self.features and library() is not None

    def logits(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The outputs (N, classes)."""
        x = x.detach().contiguous(memory_format=torch.channels_last)
        packed = [self._packed(params[name]) for name in self.names]
        found = x.new_empty(len(x), self.classes)
        function(f"network_logits_{CPP[x.dtype]}")(
            address(x),
            _addresses(packed),
            address(found),
            ctypes.c_int64(len(x)),
            *self._sizes(x, self.classes),
            ctypes.c_int64(GROUP),
            ctypes.c_double(self.eps),
        )
        return found

    def room(self, x: Tensor, classes: int) -> int:
        """How many numbers the gradient of these samples can leave to the product."""
        return len(x) * int(function(f"network_record_{CPP[x.dtype]}")(*self._sizes(x, classes)))

    def gradient(
        self, params: Mapping[str, Tensor], x: Tensor, labels: Tensor, scale: float, kept: Tensor | None = None
    ) -> Sequence[Tensor]:
        """The gradient of the summed soft-label cross-entropy times `scale`; fills `kept`, which has `room`."""
        return self._run(params, None, x, labels, scale, kept)[: len(params)]

    def loss_gradient(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The mean cross-entropy of samples with whole labels, and its gradient."""
        loss, *grads = torch.ops.dynafed.convnet_loss_gradient(
            x,
            y,
            list(params.values()),
            [list(params).index(name) for name in self.names],
            [self.channels, self.padding, self.depth, self.outputs, self.features, self.classes],
            self.eps,
        )
        return loss, grads

    def product(
        self,
        params: Mapping[str, Tensor],
        direction: Mapping[str, Tensor],
        x: Tensor,
        labels: Tensor,
        scale: float,
        kept: Tensor | None = None,
    ) -> Sequence[Tensor]:
        """The derivatives of <gradient, direction> by the parameters, samples and labels.

        What is `kept` of the gradient isn't computed again; that changes no bit.
        """
        return self._run(params, direction, x, labels, scale, kept)

    def _run(
        self,
        params: Mapping[str, Tensor],
        direction: Mapping[str, Tensor] | None,
        x: Tensor,
        labels: Tensor,
        scale: float,
        kept: Tensor | None,
    ) -> list[Tensor]:
        x, labels = x.detach().contiguous(memory_format=torch.channels_last), labels.detach().contiguous()
        packed = [self._packed(params[name]) for name in self.names]
        along = None if direction is None else [self._packed(direction[name]) for name in self.names]
        found = [torch.zeros_like(tensor) for tensor in packed]
        by_x, by_labels = torch.empty_like(x), torch.empty_like(labels)
        function(f"network_{CPP[x.dtype]}")(
            *map(address, (x, labels)),
            *(_addresses(tensors) for tensors in (packed, along, found)),
            *map(address, (kept, by_x, by_labels)),
            ctypes.c_int64(len(x)),
            *self._sizes(x, labels.shape[1]),
            ctypes.c_int64(GROUP),
            ctypes.c_double(scale),
            ctypes.c_double(self.eps),
        )
        by_name = dict(zip(self.names, found, strict=True))
        return [*(_unpacked(by_name[name], tensor) for name, tensor in params.items()), by_x, by_labels]

    def _sizes(self, x: Tensor, classes: int) -> list[ctypes.c_int64]:
        sizes = (*x.shape[2:], self.channels, self.padding, self.depth, self.outputs, classes)
        return [ctypes.c_int64(size) for size in sizes]

    def _packed(self, tensor: Tensor) -> Tensor:
        """A parameter as the kernel takes it: channels last, of weights the outputs."""
        if tensor.ndim == 4:
            return taps_of(tensor.detach())
        if tensor.ndim == 2:
            return tensor.detach().reshape(len(tensor), self.outputs, -1).mT.contiguous()
        return tensor.detach().contiguous()


@torch.library.custom_op("dynafed::convnet_loss_gradient", mutates_args=())
def _loss_gradient(
    x: Tensor, y: Tensor, params: Sequence[Tensor], order: Sequence[int], sizes: Sequence[int], eps: float
) -> list[Tensor]:
    """The parameters' `order` is that of the kernel; `sizes` are those of a `ConvNet`."""
    channels, padding, depth, outputs, features, classes = sizes
    names = tuple(map(str, order))
    network = ConvNet(names, channels, padding, depth, outputs, eps, features, classes)
    labels = F.one_hot(y, classes).to(x.dtype)
    named = {str(number): tensor for number, tensor in enumerate(params)}
    *grads, _, by_labels = network._run(named, None, x, labels, 1 / len(x), None)
    return [(labels * by_labels).sum(), *grads]


def _unpacked(tensor: Tensor, like: Tensor) -> Tensor:
    turned = {4: (3, 2, 0, 1), 3: (0, 2, 1), 1: (0,)}[tensor.ndim]
    return tensor.permute(turned).reshape(like.shape).contiguous()


def _addresses(tensors: Sequence[Tensor] | None) -> ctypes.Array[ctypes.c_void_p] | None:
    return None if tensors is None else (ctypes.c_void_p * len(tensors))(*(one.data_ptr() for one in tensors))

"""Training of fully connected networks, many steps in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafed.kernels.activations import RELU, Activation, CActivation, packed
from dynafed.kernels.build import address, function, lanes
from dynafed.optim import ADAMS, BETAS, EPS, Optimizer

KINDS = ("sum", "sgd", "momentum", "adam", "adamw")
"""The optimizers, as mlp.cpp numbers them; the first one adds up gradients and leaves the parameters alone."""
CONTRAST, MIXTURE, PRACTICE = 1, 2, 3
"""The losses but the plain one."""
GRADIENT_BATCH = 128
"""Samples at a time in a mean gradient."""
NO_FEATURES = "a network of one layer has no features"


class Drawn(NamedTuple):
    """A tensor that is drawn for each step: its name, and how many numbers it has, in all and for each sample."""

    name: str
    numbers: int
    for_sample: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class FusedLoss:
    """A loss that the kernel knows: the mean cross-entropy, or what the functions below make."""

    kind: int = 0
    """By this mlp.cpp knows what the rest means."""
    first: float = 0.0
    second: float = 0.0
    models: tuple[Mapping[str, Tensor], ...] = ()
    """Other models' parameters by name, whose features of all samples are held, too."""
    held: tuple[Tensor, ...] = ()
    """What stays the same in all steps."""
    drawn: tuple[Drawn, ...] = ()
    rows: int = 0
    noise: int = 0
    hidden: int = 0


def contrast_loss(
    wanted: Mapping[str, Tensor], unwanted: Mapping[str, Tensor], weight: float, temperature: float
) -> FusedLoss:
    """Adds weight * mean softplus((cos(z, z_unwanted) - cos(z, z_wanted)) / temperature) to the mean cross-entropy.

    z is what the last layer sees of a sample, in the model that is trained and in those with the given parameters.
    """
    return FusedLoss(CONTRAST, weight, temperature, models=(wanted, unwanted))


def mixture_loss(ratio: float, taylor: bool, inputs: int, classes: int) -> FusedLoss:
    """Mixup of each sample with the step's sample `x`, and of its label with the shares `y` of all classes; with
    `taylor`, FedMix's approximation of it."""
    return FusedLoss(MIXTURE, ratio, float(taylor), drawn=(Drawn("x", inputs), Drawn("y", classes)))


def practice_loss(generator: Mapping[str, Tensor], weight: float, agreement: float, rows: int, noise: int) -> FusedLoss:
    """Adds weight * CE(head(generated), labels) + agreement * KL(head(generated for y), model(x)), as FedGen does.

    A step has as many `labels` as `rows`, and `noise` for its samples and for these, from which
    `dynafed.generator.generate` makes what the head sees.
    """
    hidden = len(generator["0.bias"])
    more = _missing(hidden)  # the kernel takes whole vectors of units: these stay zero
    first = [F.pad(generator[name].t(), (0, more)) for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
    wider = _missing(len(generator["3.bias"]))
    last = F.pad(generator["3.weight"].t(), (0, wider, 0, more)), F.pad(generator["3.bias"], (0, wider))
    return FusedLoss(
        PRACTICE,
        weight,
        agreement,
        held=(*first, *last),
        drawn=(Drawn("labels", rows, dtype=torch.int64), Drawn("noise", rows * noise, noise)),
        rows=rows,
        noise=noise,
        hidden=hidden + more,
    )


class _Loss(ctypes.Structure):
    """As in mlp.cpp."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("first", ctypes.c_double),
        ("second", ctypes.c_double),
        ("held", ctypes.c_void_p),
        ("drawn", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("noise", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
    )


class MLPTraining:
    """Minimizes the loss of a fully connected network.

    `params` are weight, bias, weight, bias, ..., the weights column-major; they are those of the optimizer. Between the
    layers are `activations`, ReLUs if none are given. To every
    gradient is added scale * (parameter - reference) + shift: references and shifts are in the parameters' order, or
    there are none. Without an optimizer, the parameters stay as they are, and `grads` sums up the mean gradient.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        optimizer: Optimizer | None,
        *,
        scale: float = 0.0,
        reference: Sequence[Tensor] = (),
        shift: Sequence[Tensor] = (),
        loss: FusedLoss | None = None,
        activations: Sequence[Activation] = (),
    ) -> None:
        sizes, between = _sizes(params), _between(params, activations)
        self.loss = loss or FusedLoss()
        if self.loss.kind and len(params) < 4:
            raise ValueError(NO_FEATURES)
        self.width = sizes[-2] + _missing(sizes[-2])
        if self.loss.kind == PRACTICE and (self.loss.noise + sizes[-1], self.width) != _generator_sizes(self.loss):
            raise ValueError("the generator doesn't fit the network")
        self.function, self.optimizer = function("mlp_train"), optimizer
        self.inputs = sizes[0]
        self.grads = [torch.zeros_like(parameter) for parameter in params] if optimizer is None else []
        # Kept, for the kernel has but their addresses.
        wider = self.width - sizes[-2] if self.loss.kind == CONTRAST else 0
        held = [F.pad(tensor, (0, wider)) for tensor in self.loss.held] if wider else self.loss.held
        self.held = [tensor.to(torch.float32).contiguous() for tensor in held]
        self.corrections = [_like(params, given) for given in (reference if scale else (), shift)]
        self.network = (
            ctypes.c_int64(len(sizes) - 1),
            sizes,
            between,
            addresses(self._with_moments(params)),
            ctypes.c_int64(KINDS.index(_kind(optimizer))),
        )
        self.affine = ctypes.c_double(scale), *map(addresses, self.corrections)

    def __call__(
        self, x: Tensor, y: Tensor, order: np.ndarray, batch: int, drawn: Sequence[Mapping[str, Tensor]] = ()
    ) -> Tensor:
        """Take a step for each `batch` of the samples in this order; the losses before each.

        `drawn` has for each step what the loss wants.
        """
        _check_samples(x, self.inputs)
        if y.dtype != torch.int64 or not y.is_contiguous():
            raise ValueError("labels must be whole numbers and be contiguous")
        loss, optimizer = self.loss, self.optimizer
        if loss.kind == CONTRAST and [tensor.shape for tensor in self.held] != 2 * [(len(x), self.width)]:
            raise ValueError(f"there must be twice {self.width} features for each of {len(x)} samples")
        order = np.ascontiguousarray(order, np.int64)
        sizes = [min(batch, len(order) - start) for start in range(0, len(order), batch)]
        tensors = list(self._drawn(drawn, sizes)) if loss.drawn else []
        pointers = [ctypes.cast(addresses(each), ctypes.c_void_p) for each in (self.held, tensors)]
        described = _Loss(loss.kind, loss.first, loss.second, *pointers, loss.rows, loss.noise, loss.hidden)
        losses = torch.empty(len(sizes))
        done, numbers = 0, (1.0, 0.0, 0.0, EPS, 0.0)
        if optimizer is not None:
            adam = optimizer.name in ADAMS
            done = int(optimizer.counter) if adam else 0
            betas = BETAS if adam else (optimizer.momentum, 0.0)
            numbers = (optimizer.lr, *betas, EPS, optimizer.weight_decay)
        self.function(
            address(x),
            address(y),
            order.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(len(order)),
            ctypes.c_int64(batch),
            *self.network,
            ctypes.c_int64(done),
            *map(ctypes.c_double, numbers),
            *self.affine,
            ctypes.byref(described),
            address(losses),
        )
        if optimizer is not None and optimizer.name in ADAMS:
            optimizer.counter += len(sizes)
        return losses

    def _with_moments(self, params: Sequence[Tensor]) -> Iterator[Tensor]:
        """Three for each parameter: itself and its moments, or itself again in the place of those that there aren't."""
        optimizer = self.optimizer
        own = {parameter.data_ptr(): number for number, parameter in enumerate(optimizer.params if optimizer else ())}
        for place, parameter in enumerate(params):
            kept = self.grads[place : place + 1]
            if optimizer:
                number = own[parameter.data_ptr()]
                kept = [moments[number] for name, moments in optimizer.moments.items() if name != "step"]
            yield from [parameter, *kept, parameter, parameter][:3]

    def _drawn(self, drawn: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]) -> Iterator[Tensor]:
        """The tensors of each step, checked."""
        for each, size in zip(drawn, sizes, strict=True):
            for name, numbers, for_sample, dtype in self.loss.drawn:
                tensor = each[name].to(dtype).contiguous()
                if tensor.numel() != numbers + for_sample * size:
                    raise ValueError(f"'{name}' must have {numbers + for_sample * size} numbers, not {tensor.numel()}")
                yield tensor


def mean_gradient(
    params: Sequence[Tensor], x: Tensor, y: Tensor, activations: Sequence[Activation] = ()
) -> list[Tensor]:
    """The gradient of these samples' mean cross-entropy by `params`, which are as above, in their layout."""
    network = MLPTraining(params, None, activations=activations)
    network(x, y, np.arange(len(y)), GRADIENT_BATCH)
    return network.grads


def features(params: Sequence[Tensor], x: Tensor, activations: Sequence[Activation] = ()) -> Tensor:
    """What the last layer of the network sees of these samples; the parameters are as above."""
    sizes, between = _sizes(params), _between(params, activations)
    if len(params) < 4:
        raise ValueError(NO_FEATURES)
    _check_samples(x, sizes[0])
    found = torch.empty(len(x), sizes[-2])
    count, layers = ctypes.c_int64(len(x)), ctypes.c_int64(len(sizes) - 1)
    function("mlp_features")(address(x), count, layers, sizes, between, addresses(params), address(found))
    return found


def _check_samples(x: Tensor, numbers: int) -> None:
    if x[0].numel() != numbers or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"samples must have {numbers} numbers in single precision and be contiguous")


def _generator_sizes(loss: FusedLoss) -> tuple[int, int]:
    """Inputs and outputs of the generator in a loss."""
    return len(loss.held[0]), len(loss.held[-1])


def _sizes(params: Sequence[Tensor]) -> ctypes.Array[ctypes.c_int64]:
    """How wide the network is before its first layer and after each."""
    weights = params[::2]
    if not all(weight.t().is_contiguous() for weight in weights):
        raise ValueError("the weights must be column-major")
    if any(tensor.dtype != torch.float32 for tensor in params):
        raise ValueError("the parameters must be in single precision")
    return (ctypes.c_int64 * (len(weights) + 1))(weights[0].shape[1], *(len(weight) for weight in weights))


def _between(params: Sequence[Tensor], activations: Sequence[Activation]) -> ctypes.Array[CActivation]:
    """The activations after all layers but the last one."""
    hidden = len(params) // 2 - 1
    if activations and len(activations) != hidden:
        raise ValueError(f"{hidden} hidden layers have {hidden} activations, not {len(activations)}")
    return packed(activations or [RELU] * hidden)


def _missing(units: int) -> int:
    """How many units would make whole vectors of them."""
    return -units % lanes(torch.float32)


def _kind(optimizer: Optimizer | None) -> str:
    if optimizer is None:
        return "sum"
    return optimizer.name if optimizer.moments else "sgd"


def _like(params: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor | None]:
    """What is given for each parameter, in that one's type and layout; nothing, if nothing is given."""
    if not given:
        return [None] * len(params)
    found: list[Tensor | None] = []
    for own, tensor in zip(params, given, strict=True):
        if tensor.shape != own.shape:
            raise ValueError(f"a correction of shape {tuple(tensor.shape)} is for no parameter of {tuple(own.shape)}")
        fits = tensor.dtype == own.dtype and tensor.stride() == own.stride()
        found.append(tensor if fits else torch.empty_like(own).copy_(tensor))
    return found


def addresses(tensors: Iterable[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Several tensors as a kernel takes them, or that there is none in some places; the caller keeps them alive."""
    found = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(found))(*found)

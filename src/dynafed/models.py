"""The paper's networks, and anybody's own. Each of ours is `head(features(x))`, for methods that use the features."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dynafed.errors import UserError, first_line
from dynafed.registry import Registry, required_arguments
from dynafed.settings import setting

if TYPE_CHECKING:
    from dynafed.config import Config

Shape = tuple[int, ...]
Factory = Callable[..., nn.Module]
"""Makes a fresh model; called with (shape of a sample, number of classes) if it needs two arguments, else with none."""

NORMS = ("instance", "group", "layer", "batch", "none")


@dataclass(frozen=True)
class ConvNetSettings:
    """Section `convnet`."""

    width: int = setting(128, "channels of every block", low=1)
    depth: int = setting(3, "blocks of convolution, norm, ReLU, average pooling", low=1)
    norm: str = setting("instance", "instance is GroupNorm with one group a channel", choices=NORMS)


@dataclass(frozen=True)
class MLPSettings:
    """Section `mlp`."""

    width: int = setting(128, "units of every hidden layer", low=1)
    depth: int = setting(2, "hidden layers", low=0)


@dataclass(frozen=True)
class ResNetSettings:
    """Section `resnet`, for resnet8 and resnet18."""

    width: int = setting(0, "channels of the first stage (0: 16 for resnet8, 64 for resnet18)", low=0)
    norm: str = setting("group", "group is GroupNorm with eight groups", choices=NORMS)


class Classifier(nn.Module):
    """A network in two parts: `features` maps a sample to a vector, `head` is one linear layer over it."""

    def __init__(self, features: nn.Sequential, width: int, classes: int) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        logits: Tensor = self.head(self.features(x))
        return logits


def mlp(shape: Shape, classes: int, settings: MLPSettings) -> Classifier:
    """Fully connected ReLU layers on the flattened sample: 784-128-128-10 in the paper."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = int(torch.Size(shape).numel())
    for _ in range(settings.depth):
        layers += [nn.Linear(width, settings.width), nn.ReLU()]
        width = settings.width
    return Classifier(nn.Sequential(*layers), width, classes)


def convnet(shape: Shape, classes: int, settings: ConvNetSettings) -> Classifier:
    """The paper's ConvNet; 28x28 inputs are padded to 32x32 by the first convolution."""
    channels, height, width = _image(shape, "convnet")
    layers: list[nn.Module] = []
    for block in range(settings.depth):
        padding = 3 if block == 0 and (height, width) == (28, 28) else 1
        height, width = (height + 2 * padding - 2) // 2, (width + 2 * padding - 2) // 2
        if min(height, width) < 1:
            raise UserError(f"convnet.depth = {settings.depth} halves images of {shape[1]}x{shape[2]} to nothing")
        layers += [
            nn.Conv2d(channels, settings.width, 3, padding=padding),
            _norm(settings.norm, settings.width),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
        channels = settings.width
    return Classifier(nn.Sequential(*layers, nn.Flatten()), channels * height * width, classes)


class _Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            _norm(norm, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            _norm(norm, outputs),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(norm, outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(shape: Shape, classes: int, settings: ResNetSettings, *, stages: tuple[int, ...], width: int) -> Classifier:
    """A residual network for small images: `stages[i]` blocks with `width * 2**i` channels."""
    channels, _, _ = _image(shape, "resnet")
    width = settings.width or width
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        _norm(settings.norm, width),
        nn.ReLU(),
    ]
    inputs = width
    for stage, blocks in enumerate(stages):
        outputs = width * 2**stage
        for block in range(blocks):
            layers.append(_Residual(inputs, outputs, 2 if stage and not block else 1, settings.norm))
            inputs = outputs
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), inputs, classes)


@dataclass(frozen=True)
class ModelSpec:
    """A family of networks with settings of its own: `build(shape, classes, settings)` makes one."""

    build: Callable[[Shape, int, Any], nn.Module]
    section: str = ""
    """The config's section that holds the settings."""
    Settings: type[Any] | None = None
    integers: bool = False
    """Whether it takes whole numbers, such as the ids of words; else they become float32."""


MODELS: Registry[ModelSpec | Factory] = Registry(
    "model",
    {
        "convnet": ModelSpec(convnet, "convnet", ConvNetSettings),
        "mlp": ModelSpec(mlp, "mlp", MLPSettings),
        "resnet8": ModelSpec(partial(resnet, stages=(1, 1, 1), width=16), "resnet", ResNetSettings),
        "resnet18": ModelSpec(partial(resnet, stages=(2, 2, 2, 2), width=64), "resnet", ResNetSettings),
    },
)
"""Networks by name. Another package's is a `ModelSpec`, or a factory of an `nn.Module`."""


def section_types(models: Iterable[str]) -> dict[str, type[Any]]:
    """The settings of these models, by section."""
    specs = [spec for name in models if name != "custom" and isinstance(spec := MODELS.load(name), ModelSpec)]
    return {spec.section: spec.Settings for spec in specs if spec.Settings is not None}


def check_name(model: str) -> None:
    """Refuse a name that can't be a model's."""
    if model != "custom":
        MODELS.check(model)


def takes_integers(model: str) -> bool:
    """Whether samples that are whole numbers stay so: with every network of the user's own, unless its spec says no."""
    spec = None if model == "custom" else MODELS.load(model)
    return not isinstance(spec, ModelSpec) or spec.integers


def build(config: Config, shape: Shape, classes: int, factory: Factory | None = None) -> nn.Module:
    """A fresh model as configured, or from the user's own factory."""
    if factory is not None:
        return from_factory(factory, shape, classes)
    if config.model == "custom":
        raise UserError("model = 'custom' stands for a factory given in Python: pass it again as model=...")
    spec = MODELS.load(config.model)
    if not isinstance(spec, ModelSpec):
        return from_factory(spec, shape, classes, config.model)
    settings = config.section(spec.section, spec.Settings) if spec.Settings else None
    try:
        return spec.build(shape, classes, settings)
    except (RuntimeError, MemoryError, OverflowError) as error:  # settings that no memory is large enough for
        raise UserError(f"model = '{config.model}' can't be made with these settings: {first_line(error)}") from None


def from_factory(factory: Factory, shape: Shape, classes: int, name: str = "") -> nn.Module:
    """A fresh model from the user's own factory."""
    if not callable(factory) or isinstance(factory, nn.Module):
        named = f" = '{name}'" if name else ""
        raise UserError(
            f"model{named} must be a function that makes a fresh torch.nn.Module, not a {type(factory).__name__}"
        )
    try:
        model = factory(shape, classes) if required_arguments(factory) == 2 else factory()
    except UserError:
        raise
    except Exception as error:  # it is the user's code: whatever it raises is what they need to know
        raise UserError(f"the model factory failed: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"the model factory returned {type(model).__name__}, not a torch.nn.Module")
    return model


@torch.no_grad()
def check(model: nn.Module, x: Tensor, classes: int, kind: str = "classes") -> Tensor:
    """Refuse a network that doesn't turn this one sample into so many outputs, or has nothing to train.

    Returns the outputs.
    """
    model.eval()
    try:
        logits = model(x)
    except Exception as error:  # it is the user's code: whatever it raises is what they need to know
        floats = x.is_floating_point()
        hint = "" if floats else "; an nn.Embedding takes whole numbers, other layers want float32"
        samples = f"{'samples' if floats else 'whole numbers'} of shape {tuple(x.shape[1:])}"
        raise UserError(f"the model can't take {samples}: {first_line(error)}{hint}") from None
    got = tuple(getattr(logits, "shape", ()))
    if len(got) == 2 and got[0] == 1 and got[1] != classes:
        raise UserError(
            f"the network has {got[1]} output{'s' * (got[1] != 1)} for a sample, but there are {classes} {kind}"
        )
    if got != (1, classes):
        found = f"of shape {got}" if got else type(logits).__name__
        raise UserError(f"the model's output for one sample must be a tensor of shape {(1, classes)}, not {found}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("the model has no trainable parameters")
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.is_complex():
            raise UserError(f"the model's '{name}' is complex: only real numbers can be averaged and checked")
        if isinstance(tensor, Tensor) and not torch.isfinite(tensor).all():
            raise UserError(f"the model's '{name}' holds NaN or infinity before round 1")
    outputs: Tensor = logits
    return outputs


def has_sample_gradient(model: nn.Module, x: Tensor) -> bool:
    """Whether the outputs for this sample have a gradient by it; whole numbers and a `.long()` in forward have none."""
    if not x.is_floating_point():
        return False
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        outputs = model.eval()(leaf).sum()
        return outputs.requires_grad and torch.autograd.grad(outputs, leaf, allow_unused=True)[0] is not None


def needs_pairs(model: nn.Module, x: Tensor) -> bool:
    """Whether a batch of this one sample can't be trained on, because BatchNorm has but one value per channel."""
    norms = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return False
    trial = copy.deepcopy(model).train()
    try:
        with torch.no_grad():
            trial(x)
    except ValueError as error:
        return "more than 1 value per channel" in str(error)
    return False


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    groups = {"instance": channels, "group": 8, "layer": 1}[kind]
    if channels % groups:
        raise UserError(f"norm = 'group' needs a width that eight divides, not {channels}")
    return nn.GroupNorm(groups, channels)


def _image(shape: Shape, model: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise UserError(
            f"{model} wants images (channels, height, width), not samples of shape {shape}: try model = mlp"
        )
    return shape[0], shape[1], shape[2]

"""Would LayerNorm on our kernels gain anything? CPU time of one client's steps, in turns.

python experiments/layer_norm.py

After linear layers, LayerNorm is a group norm of one group on images of one pixel, and there is a kernel for that. On
images, it is the same without scale and shift, which it has for every pixel: they are torch's. So what it would gain
can be measured with what there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from dynafed import Config
from dynafed.engine.federation import Federation
from dynafed.engine.local import local_update
from dynafed.engine.server import server_broadcast
from dynafed.execution import keep_freed_memory
from dynafed.kernels import ops

TURNS, STEPS = 12, 24


class OnOurs(nn.Module):
    """LayerNorm and ReLU by the kernel that follows convolutions."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        """The norm's output, after ReLU."""
        if x.ndim == 2:
            return ops.Rest(1)(x[..., None, None], self.weight, self.bias).flatten(1)
        plain = ops.Rest(1, low=1.0)(x, None, None)
        return torch.relu(plain * self.weight + self.bias)


def on_torch(kind: Callable[..., nn.Module], *shape: int) -> nn.Module:
    """A norm of torch's and ReLU."""
    return nn.Sequential(kind(*shape), nn.ReLU())


def mlp(norm: Callable[[int], nn.Module]) -> nn.Module:
    """W1's network with something between its layers."""
    inner = [nn.Linear(784, 128), norm(128), nn.Linear(128, 128), norm(128)]
    return nn.Sequential(*inner, nn.Linear(128, 10))


def conv(norm: Callable[[int, int, int], nn.Module]) -> nn.Module:
    """W4's network with other norms."""
    layers: list[nn.Module] = []
    for inputs, outputs, side in ((3, 32, 32), (32, 64, 16), (64, 64, 8)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), norm(outputs, side, side), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


def layer_norm(*shape: int) -> nn.Module:
    """As torch has it."""
    return on_torch(nn.LayerNorm, shape)  # type: ignore[arg-type]


def group_norm(groups: int, channels: int, *_: int) -> nn.Module:
    """As torch has it."""
    return on_torch(nn.GroupNorm, groups, channels)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "MLP without norms, our kernel": (partial(mlp, lambda _: nn.ReLU()), "own"),
    "MLP without norms, torch, recorded": (partial(mlp, lambda _: nn.ReLU()), "torch"),
    "MLP with LayerNorm, torch, recorded": (partial(mlp, layer_norm), "torch"),
    "MLP with LayerNorm on the group norm's kernel, recorded": (partial(mlp, OnOurs), "torch"),
    "ConvNet with GroupNorm of 1 group, our kernels": (partial(conv, partial(group_norm, 1)), "own"),
    "ConvNet with LayerNorm, torch": (partial(conv, layer_norm), "torch"),
    "ConvNet with LayerNorm on the group norm's kernel": (partial(conv, OnOurs), "own"),
}
SHAPES = {"MLP": (784,), "ConvNet": (3, 32, 32)}


def job(name: str) -> Callable[[], float]:
    """One client's steps; returns their CPU time in ms."""
    factory, kernels = NETWORKS[name]
    rng = np.random.default_rng(0)
    shape = SHAPES[name.partition(" ")[0]]
    x, y = rng.standard_normal((32 * STEPS, *shape), dtype=np.float32), np.arange(32 * STEPS) % 10
    config = Config.load(None, {"clients": 1, "rounds": 10_000, "kernels": kernels})
    federation = Federation.create(
        config, model=factory, train=(x, y), test=(x[:10], y[:10]), clients=[np.arange(len(y))]
    )
    client, model = federation.client(0), federation.problem.initial_model()
    broadcast = server_broadcast(federation.server_side, 1, model, {})

    def measure() -> float:
        began = time.thread_time()
        local_update(federation.client_side, client, broadcast, None)
        return 1000 * (time.thread_time() - began) / STEPS

    # Steps are recorded after 2000 of them; convolutions leave nothing to gain by it.
    for _ in range(2100 // STEPS if "recorded" in name else 2):
        measure()
    return measure


def main() -> None:
    """Print the best of each in ms a step; all take turns."""
    torch.set_num_threads(1)
    keep_freed_memory()
    jobs = {name: job(name) for name in NETWORKS}
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(TURNS):
        for name, measure in jobs.items():
            taken[name].append(measure())
    for name, each in taken.items():
        print(f"{name:56s} {min(each):8.3f} ms a step")


if __name__ == "__main__":
    main()

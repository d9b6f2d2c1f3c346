"""How a run is executed: in how many processes and threads, in chunks of what size, on which kernels.

Nothing here changes what is computed. Processes and threads change no bit of it. Chunks and kernels change the
rounding, so they depend on the work to be done, never on what the machine happens to be doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from dynafed import kernels
from dynafed.config import KERNELS_VERSION
from dynafed.kernels.activations import Activation
from dynafed.tracing import CALLS_BEFORE_FIRST

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.methods import Composition
    from dynafed.synthesis import DynaFedSettings

log = logging.getLogger("dynafed")

MIN_KERNEL_WORK = 100_000
"""Samples, for convolutions times their channels, from which our kernels are used: so many take 1.5 seconds longer
without them in one process. To load the kernels takes 5 ms, to find and try them in a network of the user's own about
a second. Where they aren't in the package they are compiled once, in half a minute."""
MIN_TRACED_STEPS = 3 * CALLS_BEFORE_FIRST
"""Steps in a process from which tracing them is worth its second: it begins late, and a step saves half a ms."""
MAX_CHUNK = 75
"""Synthetic samples that a network of convolutions takes at a time, at most: its activations are large."""
INNER_STEP_COST = 4
"""What an inner step costs with its adjoint, in gradients."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


@dataclass(frozen=True)
class ExecutionPlan:
    """How a run is executed; resolved once, before round 1."""

    workers: int
    threads: int
    """Of each worker."""
    trace: bool
    """Whether training steps are traced and replayed."""
    kernels: bool
    """Whether the network runs on our own kernels."""
    version: int
    """Which networks these know."""
    parts: tuple[str, ...]
    """What of the network runs on them."""
    activations: tuple[Activation, ...]
    """Those of the chain of linear layers of which a kernel trains a client's whole epoch; empty if none does."""
    server_threads: int
    """That share the synthetic samples."""
    chunk: int
    """How many of these are taken at a time; 0 if there are none."""

    @property
    def fused_epochs(self) -> bool:
        """Whether a kernel trains a client's whole epoch."""
        return bool(self.activations)

    def __str__(self) -> str:
        parts = [
            f"{self.workers} worker(s) with {self.threads} thread(s) each",
            "steps are traced when there are many" if self.trace else "steps aren't traced",
            self._kernels(),
            f"synthetic samples {self.chunk} at a time in {self.server_threads} thread(s)" if self.chunk else "",
        ]
        return ", ".join(filter(None, parts))

    def _kernels(self) -> str:
        said = [*self.parts, *(["whole epochs of linear layers"] if self.fused_epochs else [])]
        return f"our own kernels ({'; '.join(said)})" if self.kernels else "torch's kernels"


def resolve(
    config: Config,
    network: nn.Module,
    samples: int,
    methods: Composition,
    choice: str = "auto",
    sample: Tensor | None = None,
) -> tuple[ExecutionPlan, nn.Module]:
    """The plan of a run in which clients train on `samples` samples in all, and the network that it runs on.

    `choice` of kernels is "own", "torch" or "auto"; `sample` is a batch of one, as the network takes it. The network is
    the given one, or an accelerated copy.
    """
    from dynafed.synthesis import DynaFedSettings

    used = any(step.name == "dynafed" for step in methods.steps)
    synthesis = config.section("dynafed", DynaFedSettings) if used else None
    version = config.kernels_version or KERNELS_VERSION
    found = kernels.coverage(network, sample, version)
    plain = config.loss == "cross_entropy" and _has_head(network, methods)
    fusable = bool(found.mlp) and methods.declares_steps and plain
    worth = _kernel_work(found, samples, synthesis_work(synthesis) if synthesis else 0) >= MIN_KERNEL_WORK
    wanted = (fusable or bool(found.channels)) and {"own": True, "torch": False, "auto": worth}[choice]
    accelerated = kernels.accelerate(network, sample, version) if wanted else None
    processes = 1 if config.device != "cpu" else config.workers or available_cores()
    workers = min(processes, config.sampled)
    # The server trains, too, where it has samples.
    long = samples / config.batch_size / workers >= MIN_TRACED_STEPS or any(m.needs.server_data for m in methods.steps)
    plan = ExecutionPlan(
        workers=workers,
        threads=config.threads,
        # Layers with buffers change them in passing, and a replay must change nothing.
        trace=config.record and long and next(network.buffers(), None) is None,
        kernels=accelerated is not None,
        version=version,
        parts=() if accelerated is None else tuple(kernels.described(accelerated)),
        activations=found.mlp if accelerated is not None and fusable else (),
        server_threads=processes,
        chunk=(synthesis.chunk or chunk_size(network, synthesis.samples)) if synthesis else 0,
    )
    return plan, network if accelerated is None else accelerated


TrainEpoch = Callable[[Tensor, Tensor, np.ndarray, int], Tensor]
"""Takes samples, labels, the order in which they are seen and the size of a batch; returns each step's loss."""


fused_epoch = kernels.MLPTraining
"""What trains parameters in place, an epoch in one call; only where the plan says `fused_epochs`."""

fused_gradient, fused_features = kernels.mean_gradient, kernels.features
"""The gradient of some samples' mean loss, and what the last layer sees of them; in the same place."""

known_weight_gradients = kernels.weight_gradients_known
"""A context in which our kernels leave the weights' own gradients at zero: only derivatives of them are wanted."""

whole_network = kernels.ConvNet.of
"""What computes an accelerated network's gradients and Hessian products in one call, or None."""


def accelerate_synthesis(network: nn.Module, gradients: int, shape: tuple[int, ...]) -> nn.Module:
    """A network for a synthesis of so many samples' gradients: on our kernels, if that is worth it."""
    sample = next(network.parameters()).new_zeros(1, *shape)
    found = kernels.coverage(network, sample)
    worth = _kernel_work(found, 0, gradients) >= MIN_KERNEL_WORK
    accelerated = kernels.accelerate(network, sample) if worth else None
    if found.channels:
        log.info("synthesis on %s kernels", "torch's" if accelerated is None else "our own")
    return network if accelerated is None else accelerated


def synthesis_work(settings: DynaFedSettings) -> int:
    """How many samples' gradients a synthesis takes."""
    return settings.iterations * settings.inner_steps * settings.samples * INNER_STEP_COST


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chunk_size(network: nn.Module, samples: int) -> int:
    """How many synthetic samples to take at a time: chunks of the same size, an even number of them."""
    if not any(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in network.modules()):
        return samples
    chunks = 2 * -(-samples // (2 * MAX_CHUNK))
    return -(-samples // chunks)


def _has_head(network: nn.Module, methods: Composition) -> bool:
    """Whether what methods take for features, if they do, is what the last layer sees."""
    if not any(method.needs.features for method in methods.clients):
        return True
    head = getattr(network, "head", None)
    return type(head) is nn.Linear and list(network.parameters())[-2] is head.weight


def _kernel_work(found: kernels.Coverage, trained: int, synthesis: int) -> int:
    """What our kernels would do: samples of local training, and samples' gradients of a synthesis."""
    return max((trained + synthesis) * found.channels, trained if found.mlp else 0)


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """Let each torch operation run in one thread, while several threads of ours call them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Let this process and its workers reuse memory that they have freed.

    By default, glibc returns every large block to the system, and clearing the next one costs a quarter of the time of
    training.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_THRESHOLD, 2**30)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

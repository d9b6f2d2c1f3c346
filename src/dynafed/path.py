"""The one place that decides how work is done: in how many processes and threads, in what portions, by which kernels.

Nothing here changes what is computed. Processes and threads change no bit of it; the portions and the kernels change
the rounding, so they are decided by the work to be done, never by what the machine happens to be doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from dynafed import optim
from dynafed.record import AFTER

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.methods import Composition
    from dynafed.synthesis.settings import DynaFedSettings

log = logging.getLogger("dynafed")

WORTH_KERNELS = 3_000_000
"""Samples, for a ConvNet times its channels, from which our own kernels are worth their compilation: that takes five
seconds or so, and without them so many samples take 45 longer in one process, 6 in each of eight."""
WORTH_RECORDING = 3 * AFTER
"""Steps in a process from which recording them is worth its second: it begins late, and a step saves half a ms."""
PORTION = 75
"""Synthetic samples that a network of convolutions takes at a time, at most: what lies between its layers is large."""
PRODUCT = 4
"""What an inner step costs, there and back, in gradients."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


@dataclass(frozen=True)
class Path:
    """How a run is executed."""

    workers: int
    threads: int
    """Of each worker."""
    record: bool
    """Whether training steps are recorded and replayed."""
    kernels: bool
    """Whether the network runs on our own kernels."""
    epochs: bool
    """Whether one of them does a client's whole epoch."""
    server_threads: int
    """That share the synthetic samples."""
    portion: int
    """How many of these are taken at a time; 0 if there will be none."""

    def __str__(self) -> str:
        parts = [
            f"{self.workers} worker(s) with {self.threads} thread(s) each",
            "steps are recorded when there are many" if self.record else "steps aren't recorded",
            "our own kernels" if self.kernels else "torch's kernels",
            f"synthetic samples {self.portion} at a time in {self.server_threads} thread(s)" if self.portion else "",
        ]
        return ", ".join(filter(None, parts))


def choose(config: Config, module: nn.Module, samples: int, methods: Composition) -> Path:
    """The path of a run that trains this network on `samples` samples of clients in all."""
    from dynafed import kernels, models
    from dynafed.synthesis.settings import DynaFedSettings

    synthesis = config.section("dynafed", DynaFedSettings) if "dynafed" in config.used_sections() else None
    steps_of_adam = methods.client.plain() and config.optimizer in optim.ADAMS and models.is_plain_mlp(module)
    able = any(steps_of_adam or isinstance(part, models.Blocks) for part in kernels.users(module))
    worth = _worth(module, samples, synthesis_work(synthesis) if synthesis else 0)
    own = kernels.use(module, able and {"own": True, "torch": False, "auto": worth}[config.kernels])
    processes = 1 if config.device != "cpu" else config.workers or cores()
    workers = min(processes, config.sampled)
    # The server trains, too, where it has samples.
    long = samples / config.batch_size / workers >= WORTH_RECORDING or any(m.needs.server_data for m in methods.steps)
    return Path(
        workers=workers,
        threads=config.threads,
        # Layers with buffers change them in passing, and a recording must change nothing.
        record=config.record and long and next(module.buffers(), None) is None,
        kernels=own,
        epochs=own and steps_of_adam,
        server_threads=processes,
        portion=(synthesis.chunk or portion(module, synthesis.samples)) if synthesis else 0,
    )


@contextlib.contextmanager
def kernels_for(module: nn.Module, samples: int) -> Iterator[None]:
    """Our kernels for a network about which nothing has been decided yet, while it has so many gradients to find."""
    from dynafed import kernels

    open = [blocks for blocks in kernels.users(module) if blocks.own_kernels is None]
    if open:
        own = kernels.use(module, _worth(module, 0, samples))
        log.info("synthesis on %s kernels", "our own" if own else "torch's")
    try:
        yield
    finally:
        for blocks in open:
            blocks.own_kernels = None


def synthesis_work(settings: DynaFedSettings) -> int:
    """How many samples' gradients a synthesis takes."""
    return settings.iterations * settings.inner_steps * settings.samples * PRODUCT


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def portion(module: nn.Module, samples: int) -> int:
    """How many synthetic samples to take at a time: parts of the same size, an even number of them."""
    if not any(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in module.modules()):
        return samples
    parts = 2 * -(-samples // (2 * PORTION))
    return -(-samples // parts)


def _worth(module: nn.Module, trained: int, synthesis: int) -> bool:
    """Whether there is so much to do: samples in local training, and samples' gradients in a synthesis."""
    from dynafed import kernels, models

    work = [
        (trained + synthesis) * part.width if isinstance(part, models.Blocks) else trained
        for part in kernels.users(module)
    ]
    return max(work, default=0) >= WORTH_KERNELS


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let each torch operation run in one thread; there are several of ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Let this process and its workers use memory again that they have freed.

    By default, glibc gives every large block back to the system, whose clearing of the next one costs a quarter of the
    time of training.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_THRESHOLD, 2**30)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

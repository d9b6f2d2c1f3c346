"""A synthesis as a server does it: from its trajectory to D_syn, with progress, pictures and measures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import nn

from dynafed import tree
from dynafed.seeds import Seeds
from dynafed.synthesis.dataset import Synthetic
from dynafed.synthesis.exhibits import Album
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.synthesize import Motionless, Segments, synthesize
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.methods.base import Host
    from dynafed.synthesis.quality import Quality

log = logging.getLogger("dynafed")


@dataclass(frozen=True)
class Task:
    """What DynaFed has to know of a federation: no data, no clients."""

    module: nn.Module
    shape: tuple[int, ...]
    """Of one sample."""
    classes: int
    seeds: Seeds
    threads: int = 0
    """That share the synthetic samples (0: one a core)."""
    measure: Callable[[Segments, Synthetic], Quality] | None = None
    """Takes the paper's measures of a new D_syn, where there are real samples to compare with."""


def synthesise_from(
    trajectory: Tree, task: Task, settings: DynaFedSettings, round: int, host: Host
) -> tuple[Synthetic | None, dict[str, Any]]:
    """Algorithm 1 on the recorded checkpoints, and measures of it; None, with a warning, if they never moved."""
    from dynafed.synthesis.quality import matching_by_segment

    named, device = tree.unnest(trajectory), next(task.module.parameters()).device
    trained = [name for name, parameter in task.module.named_parameters() if parameter.requires_grad]
    checkpoints = [tree.to(tree.only(named[number], trained), device) for number in sorted(named)]
    album = Album(host.folder, settings.iterations) if host.folder else None
    task.module.eval()
    host.busy("synthesis", 0, settings.iterations)
    try:
        made = synthesize(
            task.module,
            checkpoints,
            task.shape,
            task.classes,
            settings,
            task.seeds.key("dynafed", round) % 2**63,
            work=host.folder / "synthesis.safetensors" if host.folder else None,
            check=host.check,
            busy=host.busy,
            seen=album.seen if album else lambda iteration, loss, x: None,
            threads=task.threads,
        )
    except Motionless as error:
        log.warning("no synthesis in round %d: %s", round, error)
        return None, {}
    segments = Segments(checkpoints, settings, task.seeds)
    quality = task.measure(segments, made) if task.measure else None
    if album:
        made.save(album.folder / "synthetic.safetensors")
        album.close(made, quality)
    if quality:
        by_segment = quality.matching_by_segment
    else:
        by_segment = matching_by_segment(task.module, segments, made, task.threads)
    metrics = {"inner_lr": made.inner_lr, "matching_loss": fmean(by_segment.values())}
    return made, metrics | (asdict(quality) if quality else {})

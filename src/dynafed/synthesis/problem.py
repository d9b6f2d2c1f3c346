"""The synthesis as the server runs it: from the recorded trajectory to D_syn, with progress, figures and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import nn

from dynafed import tree
from dynafed.seeds import Seeds
from dynafed.synthesis.figures import SynthesisFigures
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.synthesize import Segments, StationaryTrajectory, synthesize
from dynafed.synthesis.synthetic import SyntheticData
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.methods.base import ServerRuntime
    from dynafed.synthesis.quality import Quality

log = logging.getLogger("dynafed")


@dataclass(frozen=True)
class SynthesisProblem:
    """What DynaFed needs to know about a federation: the network and the sample shape, but no data and no clients."""

    module: nn.Module
    shape: tuple[int, ...]
    """Shape of one sample."""
    classes: int
    seeds: Seeds
    threads: int = 0
    """Threads that process the synthetic samples (0: one per core)."""
    measure_quality: Callable[[Segments, SyntheticData], Quality] | None = None
    """Computes the quality of a new D_syn, if there are real samples to compare with."""
    accelerate: bool = True
    """Whether the synthesis may choose other kernels; False where those of the module were chosen before."""


def synthesize_from_trajectory(
    trajectory: Tree, problem: SynthesisProblem, settings: DynaFedSettings, round_num: int, runtime: ServerRuntime
) -> tuple[SyntheticData | None, dict[str, Any]]:
    """Run Algorithm 1 on the recorded checkpoints; returns D_syn and metrics.

    If all checkpoints are equal, logs a warning and returns (None, {}).
    """
    from dynafed.synthesis.quality import matching_by_segment

    named, device = tree.unnest(trajectory), next(problem.module.parameters()).device
    trained = [name for name, parameter in problem.module.named_parameters() if parameter.requires_grad]
    checkpoints = [tree.to(tree.only(named[number], trained), device) for number in sorted(named)]
    figures = SynthesisFigures(runtime.folder, settings.iterations) if runtime.folder else None
    problem.module.eval()
    runtime.progress("synthesis", 0, settings.iterations)
    try:
        synthetic = synthesize(
            problem.module,
            checkpoints,
            problem.shape,
            problem.classes,
            settings,
            problem.seeds.key("dynafed", round_num) % 2**63,
            state_file=runtime.folder / "synthesis.safetensors" if runtime.folder else None,
            check_stop=runtime.check_stop,
            progress=runtime.progress,
            on_iteration=figures.on_iteration if figures else lambda iteration, loss, x: None,
            threads=problem.threads,
            accelerate=problem.accelerate,
        )
    except StationaryTrajectory as error:
        log.warning("no synthesis in round %d: %s", round_num, error)
        return None, {}
    segments = Segments(checkpoints, settings, problem.seeds)
    quality = problem.measure_quality(segments, synthetic) if problem.measure_quality else None
    if figures:
        synthetic.save(figures.folder / "synthetic.safetensors")
        figures.finish(synthetic, quality)
    if quality:
        by_segment = quality.matching_by_segment
    else:
        by_segment = matching_by_segment(problem.module, segments, synthetic, problem.threads)
    metrics = {"inner_lr": synthetic.inner_lr, "matching_loss": fmean(by_segment.values())}
    return synthetic, metrics | (asdict(quality) if quality else {})

"""The synthesis as the server runs it: from the recorded trajectory to D_syn, with progress, figures and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dynafed import tree
from dynafed.seeds import Seeds
from dynafed.stages import stage
from dynafed.synthesis.figures import SynthesisFigures
from dynafed.synthesis.invariances import Invariances, find_invariances
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.synthesize import Segments, StationaryTrajectory, UntrustedTrajectory, synthesize
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

    If all checkpoints are equal, logs a warning and returns (None, {}). If the trajectory or its synthesis is not
    trusted, the metrics hold the reason as `synthesis_refused`, and there is no D_syn.
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
    except UntrustedTrajectory as error:
        return None, _refused(str(error), round_num)
    stage("measuring the synthesis")
    invariances = find_invariances(problem.module, problem.shape)
    segments = Segments(checkpoints, settings, problem.seeds, invariances if settings.distance == "quotient" else None)
    shares = mean_shares(invariances, segments)
    quality = problem.measure_quality(segments, synthetic) if problem.measure_quality else None
    if quality:
        by_segment = quality.matching_by_segment
    else:
        by_segment = matching_by_segment(problem.module, segments, synthetic, problem.threads)
    loss, worst = fmean(by_segment.values()), settings.max_matching_loss
    if worst and not loss <= worst:
        reason = f"its matching loss is {loss:.4g}, more than dynafed.max_matching_loss = {worst:g}"
        return None, _refused(reason, round_num) | {"refused_matching_loss": loss}
    if figures:
        synthetic.save(figures.folder / "synthetic.safetensors")
        figures.finish(synthetic, quality, shares, trained)
    metrics: dict[str, Any] = {"inner_lr": synthetic.inner_lr, "matching_loss": loss}
    if settings.outlier_steps or settings.opposing_steps:
        metrics["segments_left_out"] = segments.left_out
    if synthetic.inner_rates is not None:
        metrics |= {
            "inner_lr_min": float(synthetic.inner_rates.min()),
            "inner_lr_max": float(synthetic.inner_rates.max()),
        }
    unused = sum(shares[name] for name in shares if invariances.is_unused(name, checkpoints[0][name]))
    metrics |= {"invariant_share": sum(shares.values()), "invariant_share_unused": unused}
    return synthetic, metrics | (asdict(quality) if quality else {})


def _refused(reason: str, round_num: int) -> dict[str, Any]:
    log.warning("the synthesis in round %d is not used: %s", round_num, reason)
    return {"synthesis_refused": reason}


def mean_shares(invariances: Invariances, segments: Segments) -> dict[str, float]:
    """By tensor, the share of the squared way from start to target along the invariances; the mean over segments."""
    ways = [tree.map_tensors(torch.sub, segment.target, segment.start) for segment in segments.full()]
    by_segment = [invariances.shares(way) for way in ways]
    return {name: fmean(shares[name] for shares in by_segment) for name in invariances.groups}

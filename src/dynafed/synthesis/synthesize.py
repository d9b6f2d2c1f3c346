"""Algorithm 1 of the paper: synthesize samples on which training follows the trajectory of the global model."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dynafed import optim, settings, tree
from dynafed.config import KERNELS_VERSION
from dynafed.engine.files import write_bytes
from dynafed.errors import UserError
from dynafed.execution import accelerate_synthesis, keep_freed_memory, synthesis_work
from dynafed.seeds import Seeds
from dynafed.stages import counted
from dynafed.synthesis.augment import augment
from dynafed.synthesis.invariances import Invariances, find_invariances
from dynafed.synthesis.matching import Augment, inner_problem, matching_gradient, reject_batch_norm
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.synthetic import SyntheticData
from dynafed.tree import Tree
from dynafed.version import __version__

log = logging.getLogger("dynafed")

EXPLODED = 10.0
"""A larger matching loss means that the inner steps diverge; without any inner step it is 1."""
PILOT_RATES = tuple(10 ** (power / 4) for power in range(-12, 5))
PILOT_ITERATIONS = 6
CALM = 1.1
"""Search for the initial inner rate: the rates to try, the iterations of a trial, and the largest loss allowed."""
ROUNDING = 1e-10
"""A smaller share of a squared difference is rounding."""
SAVE_EVERY = 50
"""Iterations between two saves to the state file."""

OnIteration = Callable[[int, float, Tensor], None]
"""Receives the iteration, its matching loss and the samples; iteration 0 (loss NaN) is the initialization."""


class StationaryTrajectory(UserError):
    """All checkpoints of a trajectory are equal."""


class UntrustedTrajectory(UserError):
    """Every segment of a trajectory has a step that doesn't fit the others."""


@dataclass(frozen=True)
class Segment:
    """A start checkpoint and the target that the inner steps should reach from it."""

    index: int
    """Of the start in the trajectory."""
    start: Tree
    target: Tree


def synthesize(
    model: nn.Module,
    trajectory: Sequence[Mapping[str, Tensor]] | str | Path,
    shape: tuple[int, ...],
    classes: int,
    config: DynaFedSettings | Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    state_file: Path | None = None,
    check_stop: Callable[[], None] = lambda: None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    on_iteration: OnIteration = lambda iteration, loss, x: None,
    threads: int = 0,
    accelerate: bool = True,
) -> SyntheticData:
    """Synthesize `config.samples` samples of this shape from a trajectory of checkpoints, oldest first.

    The trajectory is a list of state dicts, a folder of safetensors files in the order of their names, or the folder of
    a run. With a
    `state_file`, the state is saved there and a later call with the same arguments resumes from it, with the same bits.
    `check_stop` is called before every iteration and may raise to interrupt; `progress` receives ("synthesis", done,
    total) and `on_iteration` (iteration, loss, x) after every iteration. `threads` process the samples (0: one per
    core); their number changes no bit. With `accelerate`, a large synthesis runs on our own kernels where they fit.
    """
    chosen = DynaFedSettings.of(config)
    reject_batch_norm(model)
    if isinstance(trajectory, str | Path):
        trajectory = read_trajectory(trajectory)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    device = next(model.parameters()).device
    checkpoints = [_parameters(names, checkpoint, device) for checkpoint in trajectory]
    invariances = find_invariances(model, shape) if chosen.distance == "quotient" else None
    segments = Segments(checkpoints, chosen, Seeds(seed), invariances)
    origin = tree.digest(tree.nest({str(number): checkpoint for number, checkpoint in enumerate(checkpoints)}))
    given = model
    if accelerate:
        model = accelerate_synthesis(model, synthesis_work(chosen), shape)
    rounding = "" if model is given else f"/kernels {KERNELS_VERSION}"
    task = f"{origin}/{seed}/{shape}/{classes}/{settings.plain(chosen)}{rounding}"
    state = SynthesisState(chosen, shape, classes, len(names), Seeds(seed), device, threads)
    keep_freed_memory()
    if not (state_file and state.load(state_file, task)):
        on_iteration(0, math.nan, state.learned["x"])
        scales = tensor_scales(model, segments, state) if chosen.inner_rates == "scaled" else 1.0
        lr = chosen.inner_lr or find_inner_lr(model, segments, chosen, shape, classes, scales, check_stop, threads)
        state.set_lr(lr * scales)
    while state.done < chosen.iterations:
        try:
            check_stop()
        except BaseException:
            if state_file:
                state.save(state_file, task)
            raise
        loss = state.step(model, segments)
        on_iteration(state.done, loss, state.learned["x"])
        progress("synthesis", state.done, chosen.iterations)
        if state_file and state.done % SAVE_EVERY == 0:
            state.save(state_file, task)
    if state_file:
        state_file.unlink(missing_ok=True)
    provenance = {
        "version": __version__,
        "seed": seed,
        "trajectory": origin,
        "checkpoints": len(checkpoints),
        "config": settings.plain(chosen),
    }
    x, logits = (state.learned[part].cpu() for part in ("x", "logits"))
    return SyntheticData(x, logits, state.mean_lr, provenance, state.lr if isinstance(state.lr, Tensor) else None)


def read_trajectory(folder: str | Path) -> list[Tree]:
    """The checkpoints in a folder of safetensors files, in the order of their names; or those of a run's folder."""
    folder = Path(folder)
    kept = folder / "checkpoint" if (folder / "checkpoint").is_dir() else folder
    states = sorted(kept.glob("round-*/state.safetensors"))
    files = states or sorted(folder.glob("*.safetensors"))
    try:
        found = [safetensors.torch.load_file(file) for file in files]
    except SafetensorError as error:
        raise UserError(f"{folder} holds a damaged file: {error}") from None
    if states:
        found = _models_of_a_run(found)
    if len(found) < 2:
        more = ": a run keeps more with -s checkpoint_every=1 -s keep_checkpoints=20" if states else ""
        raise UserError(f"{folder} holds {len(found)} checkpoints, and a trajectory has at least two{more}")
    return found


def _models_of_a_run(states: Sequence[Tree]) -> list[Tree]:
    """The global models of a run's checkpoints, or what DynaFed recorded in the last one if that is more."""
    server = tree.unnest(tree.unnest(states[-1]).get("server", {}))
    recorded = tree.unnest(tree.unnest(server.get("dynafed", {})).get("trajectory", {}))
    models = [tree.unnest(state)["model"] for state in states]
    return [recorded[number] for number in sorted(recorded)] if len(recorded) > len(models) else models


class Segments:
    """The segments of a trajectory that the synthesis samples from."""

    def __init__(
        self,
        checkpoints: Sequence[Tree],
        config: DynaFedSettings,
        seeds: Seeds,
        invariances: Invariances | None = None,
    ) -> None:
        self.checkpoints, self.config, self.seeds = checkpoints, config, seeds
        self.invariances = invariances
        """Of the network; None unless `config.distance` is the quotient distance."""
        if len(checkpoints) <= config.segment:
            raise UserError(f"{len(checkpoints)} checkpoints are too few for dynafed.segment = {config.segment}")
        self.starts = [start for start in range(len(checkpoints) - config.segment) if self._moves(start)]
        stationary = len(checkpoints) - config.segment - len(self.starts)
        if not self.starts:
            raise StationaryTrajectory(
                "the trajectory doesn't move: every target equals its start, so there is nothing to match"
            )
        if stationary:
            log.warning("%d segments of the trajectory don't move and are left out", stationary)
        wild = misfits(checkpoints, config)
        fitting = [start for start in self.starts if not wild.keys() & {*range(start, start + config.segment)}]
        self.left_out = len(self.starts) - len(fitting)
        """Segments with a step that doesn't fit the others."""
        reasons = {why: [step + 1 for step in sorted(wild) if wild[step] == why] for why in wild.values()}
        if not fitting:
            raise UntrustedTrajectory(f"every segment has a step {' or '.join(reasons)}")
        if self.left_out:
            said = "; ".join(f"step {', '.join(map(str, steps))} is {why}" for why, steps in reasons.items())
            log.warning("%d segments of the trajectory are left out: %s", self.left_out, said)
        self.starts = fitting

    def draw(self, iteration: int) -> Segment:
        """The segment of one iteration."""
        rng, config = self.seeds.rng("segment", iteration), self.config
        start = self.starts[rng.integers(len(self.starts))]
        ends = range(start + 1, start + config.segment + 1)
        if config.target_draw == "last":
            return Segment(start, self.checkpoints[start], self.checkpoints[ends[-1]])
        count = config.targets[rng.integers(len(config.targets))]
        if config.target_draw == "tail":
            return Segment(start, self.checkpoints[start], self._mean(ends[-count:]))
        replace = config.target_draw == "replacement"
        drawn = rng.choice(len(ends), count if replace else min(count, len(ends)), replace=replace)
        return Segment(start, self.checkpoints[start], self._mean([ends[number] for number in drawn]))

    def full(self) -> list[Segment]:
        """Every segment, with its last checkpoint as the target."""
        length = self.config.segment
        return [Segment(start, self.checkpoints[start], self.checkpoints[start + length]) for start in self.starts]

    def _mean(self, numbers: Sequence[int]) -> Tree:
        return tree.map_tensors(
            lambda *tensors: torch.stack(tensors).mean(dim=0), *(self.checkpoints[n] for n in numbers)
        )

    def _moves(self, start: int) -> bool:
        first = self.checkpoints[start]
        return all(
            self._differ(first, self.checkpoints[end]) for end in range(start + 1, start + self.config.segment + 1)
        )

    def _differ(self, one: Tree, other: Tree) -> bool:
        if all(torch.equal(one[name], other[name]) for name in one):
            return False
        if self.invariances is None:
            return True
        difference = tree.map_tensors(torch.sub, one, other)
        return sum(self.invariances.shares(difference).values()) < 1 - ROUNDING


def misfits(checkpoints: Sequence[Tree], config: DynaFedSettings) -> dict[int, str]:
    """The steps from a checkpoint to the next that don't fit the others, and why; 0 is the first."""
    found: dict[int, str] = {}
    if config.outlier_steps:
        why = f"more than {config.outlier_steps:g} times as long as the median step"
        found |= dict.fromkeys(outlying_steps(checkpoints, config.outlier_steps), why)
    if config.opposing_steps:
        why = f"against the others, with a mean cosine below -{config.opposing_steps:g}"
        found |= dict.fromkeys(opposing_steps(checkpoints, config.opposing_steps), why)
    return found


def outlying_steps(checkpoints: Sequence[Tree], times: float) -> set[int]:
    """The steps from a checkpoint to the next that are more than `times` as long as the median; 0 is the first."""
    lengths = [tree.norm(step) for step in _steps(checkpoints)]
    usual = statistics.median(lengths)
    return {step for step, length in enumerate(lengths) if not length <= times * usual}


def opposing_steps(checkpoints: Sequence[Tree], cosine: float) -> set[int]:
    """The steps whose mean cosine with all others is below -`cosine`, or isn't a number; 0 is the first."""
    return {step for step, mean in enumerate(mean_cosines(checkpoints)) if not mean >= -cosine}


def mean_cosines(checkpoints: Sequence[Tree]) -> list[float]:
    """Of each step with all other steps that are finite; NaN if it isn't, 0 if it doesn't move."""
    lengths = [tree.norm(step) for step in _steps(checkpoints)]
    total: Tree = {}
    for step, length in zip(_steps(checkpoints), lengths, strict=True):
        if 0 < length < math.inf:
            total = {name: total.get(name, 0) + change.double() / length for name, change in step.items()}
    others = max(1, sum(0 < length < math.inf for length in lengths) - 1)
    means = []
    for step, length in zip(_steps(checkpoints), lengths, strict=True):
        if 0 < length < math.inf:
            along = sum(float((total[name] * change).sum()) for name, change in step.items()) / length
            means.append((along - 1) / others)  # its cosine with itself is 1
        else:
            means.append(0.0 if length == 0 else math.nan)
    return means


def _steps(checkpoints: Sequence[Tree]) -> Iterator[Tree]:
    for before, after in itertools.pairwise(checkpoints):
        yield tree.difference(after, before)


class SynthesisState:
    """The learned samples, label logits and inner rate, their optimizers, and the last state with a valid loss."""

    def __init__(
        self,
        config: DynaFedSettings,
        shape: tuple[int, ...],
        classes: int,
        tensors: int,
        seeds: Seeds,
        device: torch.device,
        threads: int = 0,
    ) -> None:
        noise = seeds.rng("synthetic").standard_normal((config.samples, *shape), dtype=np.float32)
        self.config, self.seeds, self.threads = config, seeds, threads
        self.done = 0
        self.learned = {
            "x": torch.from_numpy(noise).to(device),
            "logits": torch.zeros(config.samples, classes, device=device),
            "log_lr": torch.zeros(tensors if config.rates_per_tensor else (), dtype=torch.float64),
        }
        optimizers = {"x": (config.image_optimizer, config.image_lr)}
        if config.learn_labels:
            optimizers["logits"] = (config.label_optimizer, config.label_lr)
        if config.inner_lr_rate:
            optimizers["log_lr"] = ("adam", config.inner_lr_rate)
        self.optimizers = {
            part: optim.Optimizer(kind, [self.learned[part]], rate) for part, (kind, rate) in optimizers.items()
        }
        self.last_valid = self.state_dict()

    @property
    def lr(self) -> float | Tensor:
        """The inner rate, or one for each parameter tensor; positive, because logarithms are learned."""
        log_lr = self.learned["log_lr"]
        return log_lr.exp() if log_lr.ndim else math.exp(float(log_lr))

    @property
    def mean_lr(self) -> float:
        """The inner rate, or the geometric mean of the rates."""
        return math.exp(float(self.learned["log_lr"].mean()))

    def set_lr(self, lr: float | Tensor) -> None:
        """Set the inner rate, or one for each parameter tensor."""
        self.learned["log_lr"].copy_(
            lr.log() if isinstance(lr, Tensor) else torch.tensor(math.log(lr), dtype=torch.float64)
        )

    def step(self, model: nn.Module, segments: Segments, quiet: bool = False) -> float:
        """Run one iteration and return its matching loss.

        A loss that is not finite or larger than `EXPLODED` undoes the last update and halves the inner rate.
        """
        self.done += 1
        config, lr = self.config, self.lr
        segment = segments.draw(self.done)
        loss, dx, dy, dlr = matching_gradient(
            model,
            segment.start,
            segment.target,
            self.learned["x"],
            self.learned["logits"],
            lr,
            config.inner_steps,
            distance=config.distance,
            invariances=segments.invariances,
            augment=keyed_augment(config, self.seeds, "inner", self.done),
            loss_scale=loss_scale(config, self.learned["logits"].shape[1]),
            chunk=config.chunk,
            threads=self.threads,
        )
        grads = {"x": dx, "logits": dy, "log_lr": dlr * lr}
        if not (loss <= EXPLODED and all(torch.isfinite(grad).all() for grad in grads.values())):
            self.load_state_dict(self.last_valid)
            self.set_lr(self.lr / 2)
            self.last_valid = self.state_dict()
            level = logging.DEBUG if quiet else logging.WARNING
            log.log(level, "synthesis %d: loss %.3g; inner rate halved to %.3g", self.done, loss, self.mean_lr)
            return float(loss)
        self.last_valid = self.state_dict()
        for part, optimizer in self.optimizers.items():
            optimizer.step([grads[part].to(self.learned[part])])
        return float(loss)

    def state_dict(self) -> Tree:
        """A copy of all tensors that change."""
        parts = {part: optimizer.state() for part, optimizer in self.optimizers.items()}
        return tree.clone_contiguous(tree.nest({"": self.learned} | parts))

    def load_state_dict(self, saved: Tree) -> None:
        """The inverse of `state_dict`."""
        parts = tree.unnest(saved)
        for part, leaf in self.learned.items():
            leaf.copy_(parts[""][part])
        for part, optimizer in self.optimizers.items():
            optimizer.load_state(parts.get(part, {}))

    def save(self, path: Path, task: str) -> None:
        """Write the state with an identifier of its task."""
        whole = tree.nest({"now": self.state_dict(), "sound": self.last_valid}) | {"done": torch.tensor(self.done)}
        write_bytes(path, tree.seal(tree.to(whole, "cpu"), {"task": task}))

    def load(self, path: Path, task: str) -> bool:
        """Load the state if the file exists, is undamaged and belongs to this task; returns whether it was loaded."""
        try:
            whole, notes = tree.unseal(path.read_bytes())
        except (OSError, SafetensorError, ValueError):
            return False
        if notes.get("task") != task:
            return False
        self.done = int(whole.pop("done"))
        parts = tree.unnest(whole)
        self.load_state_dict(parts["now"])
        self.last_valid = parts["sound"]
        return True


def find_inner_lr(
    model: nn.Module,
    segments: Segments,
    config: DynaFedSettings,
    shape: tuple[int, ...],
    classes: int,
    scales: float | Tensor = 1.0,
    check_stop: Callable[[], None] = lambda: None,
    threads: int = 0,
) -> float:
    """The largest of `PILOT_RATES` for which the losses of a short trial stay at most `CALM`.

    The right rate depends on the network, the clients' optimizer and the data, and can't be derived from the first
    gradient, when all labels are still uniform. So rates are tried from large to small. With `scales`, the rate of each
    tensor is that times its scale.
    """
    device = next(model.parameters()).device
    fixed = replace(config, inner_lr_rate=0.0, inner_rates="tensor" if isinstance(scales, Tensor) else "single")
    for lr in counted("inner rate", sorted(PILOT_RATES, reverse=True)):
        trial = SynthesisState(fixed, shape, classes, len(segments.checkpoints[0]), segments.seeds, device, threads)
        trial.set_lr(lr * scales)
        losses = []
        for _ in range(PILOT_ITERATIONS):
            check_stop()
            losses.append(trial.step(model, segments, quiet=True))
            if losses[-1] > CALM:
                break
        if max(losses) <= CALM:
            break
    log.info("inner rate starts at %g; its trial's matching losses were up to %.3f", lr, max(losses))
    return lr


def tensor_scales(model: nn.Module, segments: Segments, state: SynthesisState) -> Tensor:
    """The length of each tensor's way divided by that of its gradient, with a geometric mean of 1 over the tensors.

    Also the geometric mean over the segments. The gradient is that on the initial samples: how long it is says nothing
    yet, but between tensors it is already much as it will be. Tensors that have no way or no gradient get 1.
    """
    labels = state.learned["logits"].softmax(dim=1)
    logs = []
    with inner_problem(model, labels, 1.0 / len(labels), state.config.chunk, state.threads) as inner:
        for segment in segments.full():
            way = tree.difference(segment.target, segment.start)
            if segments.invariances is not None:
                way = segments.invariances.project(way)
            logs.append(_log_lengths(way) - _log_lengths(inner.gradient(segment.start, state.learned["x"])))
    mean = torch.stack(logs).mean(dim=0)
    usable = mean.isfinite()
    return torch.where(usable, mean - mean[usable].mean(), 0.0).exp()


def _log_lengths(tensors: Tree) -> Tensor:
    """The logarithm of each tensor's norm; NaN where that is rounding."""
    squares = torch.stack([tensor.double().square().sum() for tensor in tensors.values()]).cpu()
    return torch.where(squares > ROUNDING * squares.sum(), squares, math.nan).log() / 2


def keyed_augment(config: DynaFedSettings, seeds: Seeds, *key: int | str) -> Augment | None:
    """The configured augmentation with a random stream of its own for every step; None if there is none."""
    if not config.augment:
        return None
    return lambda x, step: augment(x, seeds.rng("augment", *key, step))


def loss_scale(config: DynaFedSettings, classes: int) -> float:
    """Factor of the soft-label loss, after its mean over samples."""
    return 1.0 if config.loss_reduction == "samples" else 1.0 / classes


def _parameters(names: Sequence[str], checkpoint: Mapping[str, Tensor], device: torch.device) -> Tree:
    missing = [name for name in names if name not in checkpoint]
    if missing:
        raise UserError(f"a checkpoint of the trajectory lacks the model's '{missing[0]}'")
    return {name: checkpoint[name].detach().to(device) for name in names}

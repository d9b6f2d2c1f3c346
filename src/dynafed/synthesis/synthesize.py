"""Algorithm 1 of the paper: make samples on which training goes the way that the global model went."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dynafed import optim, path, settings, tree
from dynafed.engine.files import write_bytes
from dynafed.errors import UserError
from dynafed.seeds import Seeds
from dynafed.synthesis.augment import augment
from dynafed.synthesis.dataset import Synthetic
from dynafed.synthesis.matching import Augment, matching_gradient, refuse_batch_state
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.tree import Tree
from dynafed.version import __version__

log = logging.getLogger("dynafed")

EXPLODED = 10.0
"""A matching loss beyond this is no step on the way to anything: standing still costs 1."""
PILOT_RATES = tuple(10 ** (power / 4) for power in range(-12, 5))
PILOT_ITERATIONS = 6
CALM = 1.1
"""Where no inner rate is given: the rates that are tried, for how long, and the largest loss that passes."""
SAVE_EVERY = 50
"""Iterations between saves of a synthesis that has a file for it."""

Seen = Callable[[int, float, Tensor], None]
"""Is told the iteration, its matching loss and the samples."""


class Motionless(UserError):
    """The checkpoints of a trajectory are all the same."""


@dataclass(frozen=True)
class Segment:
    """A start on the trajectory and the target that the inner steps should reach from it."""

    begin: int
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
    work: Path | None = None,
    check: Callable[[], None] = lambda: None,
    busy: Callable[[str, int, int], None] = lambda what, done, total: None,
    seen: Seen = lambda iteration, loss, x: None,
    threads: int = 0,
) -> Synthetic:
    """Synthesise `config.samples` samples of this shape from a trajectory of checkpoints, oldest first.

    The trajectory is a list of state dicts or a folder of safetensors files in the order of their names. With a file
    `work` the synthesis saves itself there and, called again, goes on from there with the same bits. `check` is called
    in every iteration and may raise to interrupt, `busy` shows progress, `seen` gets every iteration's loss. `threads`
    share the work (0: one a core); their number changes no bit.
    """
    chosen = DynaFedSettings.of(config)
    refuse_batch_state(model)
    if isinstance(trajectory, str | Path):
        trajectory = read_trajectory(trajectory)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    device = next(model.parameters()).device
    checkpoints = [_parameters(names, checkpoint, device) for checkpoint in trajectory]
    segments = Segments(checkpoints, chosen, Seeds(seed))
    origin = tree.digest(tree.nest({str(number): checkpoint for number, checkpoint in enumerate(checkpoints)}))
    task = f"{origin}/{seed}/{shape}/{classes}/{settings.plain(chosen)}"
    state = Work(chosen, shape, classes, Seeds(seed), device, threads)
    path.keep_freed_memory()
    with path.kernels_for(model, path.synthesis_work(chosen)):
        if not (work and state.load(work, task)):
            seen(0, math.nan, state.leaves["x"])
            state.set_lr(chosen.inner_lr or automatic_lr(model, segments, chosen, shape, classes, check, threads))
        while state.done < chosen.iterations:
            try:
                check()
            except BaseException:
                if work:
                    state.save(work, task)
                raise
            loss = state.advance(model, segments)
            seen(state.done, loss, state.leaves["x"])
            busy("synthesis", state.done, chosen.iterations)
            if work and state.done % SAVE_EVERY == 0:
                state.save(work, task)
    if work:
        work.unlink(missing_ok=True)
    provenance = {
        "version": __version__,
        "seed": seed,
        "trajectory": origin,
        "checkpoints": len(checkpoints),
        "config": settings.plain(chosen),
    }
    x, logits = (state.leaves[part].cpu() for part in ("x", "logits"))
    return Synthetic(x, logits, state.lr, provenance)


def read_trajectory(folder: str | Path) -> list[Tree]:
    """The checkpoints in a folder of safetensors files, in the order of their names."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if len(files) < 2:
        raise UserError(f"{folder} holds {len(files)} safetensors files: a trajectory has at least two")
    try:
        return [safetensors.torch.load_file(file) for file in files]
    except SafetensorError as error:
        raise UserError(f"{folder} holds a damaged file: {error}") from None


class Segments:
    """The stretches of a trajectory that the synthesis draws from."""

    def __init__(self, path: Sequence[Tree], config: DynaFedSettings, seeds: Seeds) -> None:
        self.path, self.config, self.seeds = path, config, seeds
        if len(path) <= config.segment:
            raise UserError(f"{len(path)} checkpoints are too few for dynafed.segment = {config.segment}")
        self.begins = [begin for begin in range(len(path) - config.segment) if self._moves(begin)]
        stuck = len(path) - config.segment - len(self.begins)
        if not self.begins:
            raise Motionless("the trajectory doesn't move: every target equals its start, so there is nothing to match")
        if stuck:
            log.warning("%d segments of the trajectory don't move and are left out", stuck)

    def draw(self, iteration: int) -> Segment:
        """The segment of one iteration."""
        rng, config = self.seeds.rng("segment", iteration), self.config
        begin = self.begins[rng.integers(len(self.begins))]
        ends = range(begin + 1, begin + config.segment + 1)
        if config.target_draw == "last":
            return Segment(begin, self.path[begin], self.path[ends[-1]])
        count = config.targets[rng.integers(len(config.targets))]
        replace = config.target_draw == "replacement"
        drawn = rng.choice(len(ends), count if replace else min(count, len(ends)), replace=replace)
        return Segment(begin, self.path[begin], self._mean([ends[number] for number in drawn]))

    def whole(self) -> list[Segment]:
        """Every segment with its last checkpoint as the target, for measuring."""
        return [Segment(begin, self.path[begin], self.path[begin + self.config.segment]) for begin in self.begins]

    def _mean(self, numbers: Sequence[int]) -> Tree:
        return tree.map_tensors(lambda *same: torch.stack(same).mean(dim=0), *(self.path[n] for n in numbers))

    def _moves(self, begin: int) -> bool:
        start = self.path[begin]
        return all(
            any(not torch.equal(start[name], self.path[end][name]) for name in start)
            for end in range(begin + 1, begin + self.config.segment + 1)
        )


class Work:
    """A synthesis under way: what is learned, its optimisers, and the last state whose loss was sound."""

    def __init__(
        self,
        config: DynaFedSettings,
        shape: tuple[int, ...],
        classes: int,
        seeds: Seeds,
        device: torch.device,
        threads: int = 0,
    ) -> None:
        noise = seeds.rng("synthetic").standard_normal((config.samples, *shape), dtype=np.float32)
        self.config, self.seeds, self.threads = config, seeds, threads
        self.done = 0
        self.leaves = {
            "x": torch.from_numpy(noise).to(device),
            "logits": torch.zeros(config.samples, classes, device=device),
            "log_lr": torch.zeros((), dtype=torch.float64),
        }
        kinds = {"x": (config.image_optimizer, config.image_lr)}
        if config.learn_labels:
            kinds["logits"] = (config.label_optimizer, config.label_lr)
        if config.inner_lr_rate:
            kinds["log_lr"] = ("adam", config.inner_lr_rate)
        self.optimizers = {
            part: optim.Optimizer(kind, [self.leaves[part]], rate) for part, (kind, rate) in kinds.items()
        }
        self.sound = self.tree()

    @property
    def lr(self) -> float:
        """The inner rate; positive, because it is its logarithm that is learned."""
        return math.exp(float(self.leaves["log_lr"]))

    def set_lr(self, lr: float) -> None:
        """Choose the inner rate."""
        self.leaves["log_lr"].fill_(math.log(lr))

    def advance(self, model: nn.Module, segments: Segments, quiet: bool = False) -> float:
        """One iteration; returns its matching loss.

        A loss that is not finite or has exploded takes back the step that led to it and halves the inner rate.
        """
        self.done += 1
        config, lr = self.config, self.lr
        segment = segments.draw(self.done)
        loss, dx, dy, dlr = matching_gradient(
            model,
            segment.start,
            segment.target,
            self.leaves["x"],
            self.leaves["logits"],
            lr,
            config.inner_steps,
            distance=config.distance,
            augment=keyed_augment(config, self.seeds, "inner", self.done),
            loss_scale=loss_scale(config, self.leaves["logits"].shape[1]),
            chunk=config.chunk,
            threads=self.threads,
        )
        grads = {"x": dx, "logits": dy, "log_lr": dlr * lr}
        if not (loss <= EXPLODED and all(torch.isfinite(grad).all() for grad in grads.values())):
            self.put(self.sound)
            self.set_lr(self.lr / 2)
            self.sound = self.tree()
            level = logging.DEBUG if quiet else logging.WARNING
            log.log(level, "synthesis %d: loss %.3g; inner rate halved to %.3g", self.done, loss, self.lr)
            return float(loss)
        self.sound = self.tree()
        for part, optimizer in self.optimizers.items():
            optimizer.step([grads[part].to(self.leaves[part])])
        return float(loss)

    def tree(self) -> Tree:
        """A copy of everything that changes."""
        parts = {part: optimizer.moments() for part, optimizer in self.optimizers.items()}
        return tree.clone(tree.nest({"": self.leaves} | parts))

    def put(self, saved: Tree) -> None:
        """The inverse of `tree`."""
        parts = tree.unnest(saved)
        for part, leaf in self.leaves.items():
            leaf.copy_(parts[""][part])
        for part, optimizer in self.optimizers.items():
            optimizer.restore(parts.get(part, {}))

    def save(self, path: Path, task: str) -> None:
        """Write it down, with the task that it belongs to."""
        whole = tree.nest({"now": self.tree(), "sound": self.sound}) | {"done": torch.tensor(self.done)}
        write_bytes(path, safetensors.torch.save(tree.to(whole, "cpu"), {"task": task}))

    def load(self, path: Path, task: str) -> bool:
        """Take over what was saved for just this task, if there is any and it is whole."""
        try:
            with safe_open(path, "pt") as file:
                if (file.metadata() or {}).get("task") != task:
                    return False
                whole = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return False
        self.done = int(whole.pop("done"))
        parts = tree.unnest(whole)
        self.put(parts["now"])
        self.sound = parts["sound"]
        return True


def automatic_lr(
    model: nn.Module,
    segments: Segments,
    config: DynaFedSettings,
    shape: tuple[int, ...],
    classes: int,
    check: Callable[[], None] = lambda: None,
    threads: int = 0,
) -> float:
    """The largest inner rate, of a range that holds every sensible one, with which a short trial stays calm.

    How far the inner steps must go depends on the network, the clients' optimiser and the data, and it can't be read
    off a gradient at the start, when every label is still equally likely. So it is tried, from large to small.
    """
    device = next(model.parameters()).device
    for lr in sorted(PILOT_RATES, reverse=True):
        trial = Work(replace(config, inner_lr_rate=0.0), shape, classes, segments.seeds, device, threads)
        trial.set_lr(lr)
        losses = []
        for _ in range(PILOT_ITERATIONS):
            check()
            losses.append(trial.advance(model, segments, quiet=True))
        if max(losses) <= CALM:
            break
    log.info("inner rate starts at %g; its trial's matching losses were up to %.3f", lr, max(losses))
    return lr


def keyed_augment(config: DynaFedSettings, seeds: Seeds, *where: int | str) -> Augment | None:
    """The configured augmentation, drawn anew for every step of `where`."""
    if not config.augment:
        return None
    return lambda x, step: augment(x, seeds.rng("augment", *where, step))


def loss_scale(config: DynaFedSettings, classes: int) -> float:
    """The soft-label loss's factor on top of the mean over samples."""
    return 1.0 if config.loss_reduction == "samples" else 1.0 / classes


def _parameters(names: Sequence[str], checkpoint: Mapping[str, Tensor], device: torch.device) -> Tree:
    missing = [name for name in names if name not in checkpoint]
    if missing:
        raise UserError(f"a checkpoint of the trajectory lacks the model's '{missing[0]}'")
    return {name: checkpoint[name].detach().to(device) for name in names}

"""`dynafed synthesize`: the synthesis alone, from checkpoints of any origin."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dynafed.cli.common import Commands, add_command, add_override_argument, add_trust_argument, out, progress_bar
from dynafed.errors import UserError

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.terminal import ProgressBar


def register(commands: Commands) -> None:
    """Add the command."""
    alone = add_command(commands, "synthesize", _synthesize, "Synthesize samples from a folder of checkpoints alone.")
    alone.add_argument(
        "--trajectory",
        required=True,
        metavar="DIR",
        type=Path,
        help="safetensors files, oldest first by name; or a run's folder, which also tells model, shape and classes",
    )
    alone.add_argument("--model", metavar="NAME", help="convnet, mlp, ... or package.module:factory")
    alone.add_argument("--shape", metavar="C,H,W", help="of one sample, such as 1,28,28")
    alone.add_argument("--classes", type=int, metavar="N")
    alone.add_argument("--out", required=True, metavar="FILE", type=Path, help="synthetic.safetensors")
    alone.add_argument("--seed", type=int, default=0)
    add_override_argument(alone, "such as dynafed.samples=150, mlp.width=64")
    add_trust_argument(alone)
    alone.add_argument("--json", action="store_true")
    alone.add_argument("-v", "--verbose", action="store_true")


def _synthesize(args: argparse.Namespace) -> None:
    with progress_bar() as bar:
        summary, samples = _synthesized(args, bar)
    if args.json:
        print(json.dumps(summary))
    else:
        out.print(
            f"{samples} samples, matching loss {summary['matching_loss']:.3f}, inner rate {summary['inner_lr']:.3g}\n"
            f"file: {args.out}",
            highlight=False,
        )


def _synthesized(args: argparse.Namespace, bar: ProgressBar) -> tuple[dict[str, Any], int]:
    """What was made, in numbers; the samples are in `args.out`."""
    from dynafed import models
    from dynafed.engine.stopping import Stopped, StopSignal
    from dynafed.seeds import Seeds
    from dynafed.stages import stage
    from dynafed.synthesis import DynaFedSettings, synthesize

    config, shape, classes = _network(args)
    if not args.out.absolute().parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}")
    with Seeds(args.seed).torch_seeded("model"):
        model = models.build(config, shape, classes)
    losses: list[float] = []

    def recent_loss() -> float:
        return fmean(losses[-20:]) if losses else math.nan

    def on_iteration(iteration: int, loss: float, x: Any) -> None:
        if iteration:
            losses.append(loss)
            bar.progress.run.title = f"matching loss {recent_loss():.3f}"

    with StopSignal() as stop:
        try:
            made = synthesize(
                model,
                args.trajectory,
                shape,
                classes,
                config.section("dynafed", DynaFedSettings),
                args.seed,
                state_file=args.out.with_name(f".{args.out.name}.work"),
                check_stop=stop.check,
                progress=stage,
                on_iteration=on_iteration,
            )
        except Stopped:
            raise KeyboardInterrupt("interrupted; the same command goes on from what was saved") from None
    made.save(args.out)
    return {"file": str(args.out), "matching_loss": recent_loss(), "inner_lr": made.inner_lr}, len(made.x)


def _network(args: argparse.Namespace) -> tuple[Config, tuple[int, ...], int]:
    """The config that names the network, the shape of a sample and the number of classes."""
    from dynafed.config import Config, parse_override
    from dynafed.data.spec import get_spec
    from dynafed.engine.trust import load_run_config
    from dynafed.report.load import read_partition

    run = args.trajectory / "config.toml"
    changes = dict(parse_override(text) for text in args.set) | ({"model": args.model} if args.model else {})
    if run.is_file():
        config = load_run_config(args.trajectory, args.trust).replace(**changes)
    else:
        config = Config.load(None, changes)
    shape, classes = _parse_shape(args.shape) if args.shape else None, args.classes
    if run.is_file():
        spec, partition = get_spec(config.dataset), read_partition(args.trajectory)
        shape = shape or (spec.shape if spec else None)
        classes = classes or (partition.classes if partition else None)
    missing = {"--model": args.model or run.is_file(), "--shape": shape, "--classes": classes}
    for option, given in missing.items():
        if not given:
            raise UserError(f"{args.trajectory} doesn't tell it: synthesize needs {option}")
    assert shape is not None
    assert classes is not None
    if min(shape) < 1 or classes < 2:
        raise UserError(f"--shape {args.shape} --classes {args.classes}: sides from 1, classes from 2")
    return config, shape, classes


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(side) for side in text.split(","))
    except ValueError:
        raise UserError(f"--shape {text}: expected whole numbers such as 1,28,28") from None

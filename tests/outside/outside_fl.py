"""A tiny package that plugs into dynafed from outside: a method, a model, a dataset, a transform and a callback."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dynafed import Callback, Method, RunContext
from dynafed.messages import Broadcast, Update
from dynafed.methods import ClientContext, ClientOutput, ServerContext, ServerOutput
from dynafed.models import ModelSpec
from dynafed.problem import Problem
from dynafed.seeds import Seeds
from dynafed.settings import setting
from dynafed.transforms import UpdateTransform
from dynafed.tree import Tree


@dataclass(frozen=True)
class PullSettings:
    """Section `pull`."""

    strength: float = setting(0.1, "how far the server goes back to the model before", low=0, high=1)


class Pull(Method):
    """Both halves: clients count their rounds, the server goes a part of the way back."""

    name = "pull"
    summary = "goes a part of the way back"
    citation = "Nobody, 2026"
    Settings = PullSettings
    settings: PullSettings

    def finish(self, params: Tree, client: ClientContext) -> ClientOutput:
        rounds = client.state.get("rounds", torch.zeros(1)) + 1
        return ClientOutput(state={"rounds": rounds}, extras={"rounds": rounds})

    def extras_spec(self, problem: Problem) -> Tree:
        return {"rounds": torch.zeros(1)}

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        back = {
            name: torch.lerp(model[name], server.global_model[name], self.settings.strength)
            for name in server.problem.trainable
        }
        return ServerOutput(model | back, state, {"mean_rounds": float(server.extras["rounds"])})


@dataclass(frozen=True)
class WideSettings:
    """Section `wide`."""

    width: int = setting(8, "hidden units", low=1)


def build_wide(shape: tuple[int, ...], classes: int, settings: WideSettings) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], settings.width), nn.Tanh(), nn.Linear(settings.width, classes))


WIDE = ModelSpec(build_wide, "wide", WideSettings)


def clouds(folder: Path | None) -> Any:
    """Three Gaussian clouds."""
    rng = np.random.default_rng(0)
    y = np.arange(360) % 3
    x = (rng.normal(size=(3, 5))[y] * 2 + rng.normal(size=(360, 5))).astype(np.float32)
    return (x[:300], y[:300]), (x[300:], y[300:])


class Halve(UpdateTransform):
    """Sends the update in half precision."""

    name = "halve"

    def encode(self, update: Update, broadcast: Broadcast, seeds: Seeds) -> Update:
        return _cast(update, {name: tensor.half() for name, tensor in update.model.items()})

    def decode(self, update: Update, broadcast: Broadcast) -> Update:
        return _cast(update, {name: tensor.to(broadcast.model[name].dtype) for name, tensor in update.model.items()})


def _cast(update: Update, model: Tree) -> Update:
    return Update(**{**vars(update), "model": model})


@dataclass(frozen=True)
class DiarySettings:
    """Section `diary`."""

    file: str = setting("diary.json", "in the run's folder")


class Diary(Callback):
    """Writes down what it was told."""

    name = "diary"
    Settings = DiarySettings

    def __init__(self, settings: DiarySettings) -> None:
        self.settings = settings
        self.lines: list[Any] = []

    def on_run_begin(self, run: RunContext) -> None:
        self.lines.append(["begin", len(run.history)])

    def on_client_result(self, run: RunContext, update: Update) -> None:
        self.lines.append(["client", update.client])

    def on_round_end(self, run: RunContext, record: dict[str, Any]) -> None:
        self.lines.append(["round", record["round"]])

    def on_run_end(self, run: RunContext, result: Any) -> None:
        (run.path / self.settings.file).write_text(json.dumps(self.lines))

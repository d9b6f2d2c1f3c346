"""A trained network as it is used: it takes samples and returns labels in the form in which they were given."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynafed import models, tree
from dynafed.config import Config
from dynafed.data.schema import Schema
from dynafed.errors import UserError, first_line
from dynafed.problem import BATCH
from dynafed.seeds import Seeds
from dynafed.settings import plain
from dynafed.tasks import LossFunction, Task, add_up, loss_function
from dynafed.tree import Tree

WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"
"""The files in a run's folder: the network's parameters and buffers by name, and all else."""

FORMAT = 1


@dataclass(frozen=True)
class Predictor:
    """A network in evaluation mode, with the normalization of its inputs and the labels of its classes."""

    model: nn.Module
    schema: Schema
    task: Task

    @torch.no_grad()
    def outputs(self, x: Any) -> Tensor:
        """The network's outputs (N, classes) for raw samples, such as logits."""
        device = next(self.model.parameters()).device
        parts = torch.split(self.schema.stored_x(x, "predict"), BATCH)
        self.model.eval()
        return torch.cat([self.model(self.schema.normalize(part.to(device))) for part in parts])

    def predict(self, x: Any) -> np.ndarray:
        """What raw samples are taken for: labels as they were given, 0 and 1 for each label, or numbers."""
        return self.schema.predictions(self.outputs(x))

    def evaluate(self, x: Any, y: Any) -> dict[str, float]:
        """The metrics on raw samples with their labels, such as accuracy and loss."""
        outputs = self.outputs(x).cpu()
        wanted = self.schema.stored_y(y, len(outputs), "evaluate")
        parts = zip(torch.split(outputs, BATCH), torch.split(wanted, BATCH), strict=True)
        return self.task.metrics(add_up([self.task.tally(*part) for part in parts]))


def describe(config: Config, schema: Schema) -> dict[str, Any]:
    """What model.json says: how to build the network, and how to use it."""
    spec = None if config.model == "custom" else models.MODELS.load(config.model)
    section = spec.section if isinstance(spec, models.ModelSpec) and spec.Settings else ""
    settings = plain(config.sections[section]) if section in config.sections else {}
    kind = str(schema.dtype).removeprefix("torch.")
    described = asdict(schema) | {"dtype": kind}
    return {
        "format": FORMAT,
        "model": config.model,
        "section": section,
        "settings": settings,
        "loss": config.loss,
        "schema": described,
    }


def load(
    folder: str | Path,
    *,
    model: models.Factory | None = None,
    loss: LossFunction | None = None,
    trust: bool = False,
) -> Predictor:
    """The trained network of a run's folder: `dynafed.load("runs/mine").predict(x)` takes raw samples.

    A network that was given in Python must be given again as `model`; so must a loss, for `evaluate` alone. A folder
    whose network or loss is named as `package.module:Name` is refused unless `trust` is True.
    """
    from dynafed.engine.files import check_links
    from dynafed.engine.trust import check_places

    folder = Path(folder)
    check_links(folder)
    for name in (DESCRIPTION, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: only a finished run has one (dynafed resume {folder})")
    try:
        told = json.loads((folder / DESCRIPTION).read_text("utf-8"))
        weights = tree.unpack((folder / WEIGHTS).read_bytes())
        named = told["schema"]
        schema = Schema(
            **{key: tuple(value) if isinstance(value, list) else value for key, value in named.items()}
            | {"dtype": getattr(torch, named["dtype"])}
        )
        keys = {f"{told['section']}.{key}": value for key, value in told["settings"].items()}
        named = {"model": told["model"] if model is None else "", "loss": told["loss"] if loss is None else ""}
        check_places(named, folder / DESCRIPTION, trust)
    except UserError:
        raise
    except Exception as error:  # a damaged file can fail in every way
        raise UserError(f"{folder} holds no model that can be read: {first_line(error)}") from None
    if told["model"] == "custom" and model is None:
        raise UserError(f"the network of {folder} was given in Python: pass it again as load(..., model=...)")
    config = Config.load(None, {"model": "custom" if model is not None else told["model"]} | keys)
    with Seeds(0).torch_seeded("model"):
        module = models.build(config, schema.shape, schema.classes, model)
        # Lazy layers get their shapes in this first use.
        sample = torch.zeros(1, *schema.shape, dtype=schema.dtype)
        models.check(module, schema.normalize(sample), schema.classes, schema.targets)
    function = loss or (loss_function(config.replace(loss=told["loss"]))[1] if told["loss"] != "custom" else _no_loss)
    return Predictor(with_weights(module, weights, str(folder)), schema, Task(told["loss"], schema.targets, function))


def with_weights(module: nn.Module, weights: Tree, where: str) -> nn.Module:
    """The module with these parameters and buffers, in evaluation mode."""
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise UserError(f"the network isn't the one of {where}: {first_line(error)}") from None
    persistent = {name for name, _ in module.named_parameters()}
    if unexpected or persistent & set(missing):
        raise UserError(f"the network isn't the one of {where}: it has other parameters")
    return module.eval()


def _no_loss(outputs: Tensor, y: Tensor) -> Tensor:
    raise UserError("the loss was given in Python: pass it again as load(..., loss=...)")

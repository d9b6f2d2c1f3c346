"""DynaFed between Flower's records: aggregate in, refined aggregate out. For those who write their own strategy."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from dynafed import models
from dynafed.engine.files import make_folder
from dynafed.errors import UserError
from dynafed.flower.records import from_record, to_record
from dynafed.flower.reply_guard import NoModel
from dynafed.messages import validate_finite, validate_layout
from dynafed.methods.base import ServerRuntime
from dynafed.methods.dynafed import Algorithm
from dynafed.seeds import Seeds
from dynafed.synthesis import DynaFedSettings
from dynafed.synthesis.problem import SynthesisProblem
from dynafed.tree import Tree, cast

log = logging.getLogger("flwr")


class Refiner:
    """Records the first rounds' aggregates, makes D_syn of them, and fine-tunes every later aggregate on it.

    `model` makes the network that the arrays belong to, on the device where the server is to work; `shape` is that of
    one sample. `config` holds settings of section `dynafed`. With a `folder`, a synthesis under way saves itself there,
    and leaves D_syn and pictures of it.
    """

    def __init__(
        self,
        *,
        model: models.Factory,
        shape: Sequence[int],
        classes: int,
        config: DynaFedSettings | Mapping[str, Any] | None = None,
        seed: int = 0,
        folder: str | Path | None = None,
    ) -> None:
        self.settings = DynaFedSettings.of(config)
        if self.settings.evidence:
            raise UserError("dynafed.evidence compares with real samples, and a Flower server has none")
        self.algorithm = Algorithm(self.settings)
        self.folder = None if folder is None else make_folder(Path(folder))
        seeds = Seeds(seed)
        with seeds.torch_seeded("model"):
            module = models.from_factory(model, tuple(shape), classes)
            device = next((parameter.device for parameter in module.parameters()), None)
            models.check(module, torch.zeros(1, *shape, device=device), classes)
        self.problem = SynthesisProblem(module, tuple(shape), classes, seeds)
        self.state: Tree = self.algorithm.initial(self.problem, {})
        """All that changes: the trajectory, and D_syn once there is one."""
        self.metrics: dict[str, float] = {}
        """Numbers about the last round."""
        tensors = module.state_dict(keep_vars=True)
        self.module_tensors: Tree = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        first: dict[int, str] = {}
        self.tied = {name: first.setdefault(id(tensor), name) for name, tensor in self.module_tensors.items()}
        """For each name the first one of the same tensor: itself, unless weights are tied."""
        self.sent_dtypes = {name: tensor.dtype for name, tensor in self.module_tensors.items()}
        """Names and dtypes, in the order in which clients get them."""

    def initialize(self, arrays: ArrayRecord) -> None:
        """Set the initial model.

        Only `include_initial`, a restart after a refusal, or arrays in another order or other dtypes need it.
        """
        model = self._by_name(arrays)
        self.sent_dtypes = {name: tensor.dtype for name, tensor in model.items()}
        self.state = self.algorithm.initial(self.problem, self._to_module(model))

    def refine(self, server_round: int, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """What the clients get in place of a round's aggregate; order and dtypes are those of what they got before.

        A round without an aggregate leaves no trace; one in which the aggregate or the fine-tuned model holds NaN or
        infinity doesn't either, and raises `NoModel`.
        """
        self.metrics = {}
        if not arrays:
            return None
        aggregate = self._by_name(arrays)
        if problem := validate_finite(aggregate):
            raise NoModel(f"the aggregate of round {server_round} is no model: {problem}")
        model = self._to_module(aggregate)
        # The synthesis takes from the module what isn't trained: buffers, frozen layers.
        self.problem.module.load_state_dict(model, strict=False)
        refined = self.algorithm.refine(
            self.problem, model, self.state, server_round, ServerRuntime(self.folder, progress=_log_progress)
        )
        if problem := validate_finite(refined.model):
            raise NoModel(f"fine-tuning round {server_round} returned no model: {problem}; lower dynafed.finetune_lr")
        self.state = refined.state
        self.metrics = {name: value for name, value in refined.metrics.items() if not isinstance(value, str)}
        if "matching_loss" in self.metrics:
            log.info("DynaFed: D_syn is made; %s", ", ".join(f"{name} {x:.3g}" for name, x in self.metrics.items()))
        if refined.model is not model:
            log.info("DynaFed: the aggregate of round %d is fine-tuned on D_syn", server_round)
            aggregate = {name: refined.model[self.tied[name]] for name in aggregate}
        result = {name: cast(aggregate[name], dtype) for name, dtype in self.sent_dtypes.items()}
        if self._is_list(arrays):
            result = {str(number): result[name] for number, name in enumerate(self.module_tensors)}
        return to_record(result)

    def _by_name(self, arrays: ArrayRecord) -> Tree:
        """The arrays by the model's names, if they fit it."""
        sent = from_record(arrays)
        if self._is_list(arrays):
            sent = {name: sent[str(number)] for number, name in enumerate(self.module_tensors)}
        if problem := validate_layout(sent, self.module_tensors):
            raise UserError(f"the federation's arrays don't fit the model that DynaFed was given: {problem}")
        return sent

    def _is_list(self, arrays: ArrayRecord) -> bool:
        """Whether they were a list in the model's order, to which Flower gave numbers for names."""
        return set(arrays) == {str(number) for number in range(len(self.module_tensors))}

    def _to_module(self, model: Tree) -> Tree:
        """In the module's own dtypes, each tied tensor once."""
        return {
            name: cast(model[name], self.module_tensors[name].dtype)
            for name, first in self.tied.items()
            if name == first
        }


def _log_progress(what: str, done: int, total: int) -> None:
    if done % -(-total // 10) == 0:
        log.info("DynaFed: %s %d of %d", what, done, total)

"""What a run is made of before round 1: the data, who has which part of it, the network, the methods."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dynafed import data, methods, models, tree
from dynafed.config import Config
from dynafed.data import Dataset, Partition
from dynafed.errors import UserError
from dynafed.path import Path, choose
from dynafed.record import Recorder
from dynafed.seeds import Seeds
from dynafed.tree import Tree

CHUNK = 1000
"""Samples that are looked at together where there may be many."""


@dataclass(frozen=True)
class Plan:
    """Everything that server and clients agree on; it never changes during a run."""

    config: Config
    dataset: Dataset
    partition: Partition
    server_rows: np.ndarray
    validation_rows: np.ndarray
    module: nn.Module

    @classmethod
    def make(
        cls,
        config: Config,
        *,
        model: models.Factory | None = None,
        train: tuple[Any, Any] | None = None,
        test: tuple[Any, Any] | None = None,
        clients: Sequence[Any] | None = None,
    ) -> Plan:
        """Load or take the data, split it, build the network; all by the config's seed."""
        config = config.replace()  # whoever built it by hand has it checked here
        device = plan_device(config)
        if (train is None) != (test is None):
            raise UserError("give both train=(x, y) and test=(x, y), or neither")
        if train is not None and test is not None:
            dataset = data.from_arrays(train, test)
            config = config.replace(dataset="custom")
        elif config.dataset == "custom":
            raise UserError("dataset = 'custom' stands for arrays given in Python: pass train= and test= again")
        else:
            dataset = _load(config.dataset, config.data_folder())
            if config.data_dir:
                config = config.replace(data_dir=str(config.data_folder()))
        if model is not None:
            config = config.replace(model="custom")
        seeds = Seeds(config.seed)
        labels = dataset.train_y.numpy()
        free = np.arange(len(labels))
        if clients is not None:
            partition = data.partition_from_lists(clients, len(labels), allow_empty=config.min_samples == 0)
            config = config.replace(clients=len(partition), partition="custom")
            free = np.setdiff1d(free, partition.indices)
            if config.server_samples + config.validation_samples > len(free):
                raise UserError(
                    f"clients=[...] leaves {len(free)} samples: too few for server_samples = {config.server_samples} "
                    f"and validation_samples = {config.validation_samples}"
                )
        rest, server_rows = _carve(labels, free, config.server_samples, seeds, "server")
        rest, validation_rows = _carve(labels, rest, config.validation_samples, seeds, "validation")
        if clients is None and config.partition == "custom":
            raise UserError("partition = 'custom' stands for index lists given in Python: pass clients= again")
        if clients is None:
            shares = data.make_partition(
                config.partition,
                labels[rest],
                config.clients,
                alpha=config.alpha,
                classes_per_client=config.classes_per_client,
                min_samples=config.min_samples,
                rng=seeds.rng("partition"),
            )
            partition = Partition(rest[shares.indices], shares.offsets)
        with seeds.torch_seeded("model"):
            module = models.build(config, dataset.shape, dataset.classes, model).to(device)
            plan = cls(config, dataset, partition, server_rows, validation_rows, module)
            # Still under the key: lazy layers get their weights in this first use.
            plan.check_model()
        # What was chosen stays, also for whoever resumes the run with more rounds.
        return replace(plan, config=config.replace(kernels="own" if plan.path.kernels else "torch"))

    @cached_property
    def seeds(self) -> Seeds:
        """The run's random streams."""
        return Seeds(self.config.seed)

    @cached_property
    def methods(self) -> methods.Composition:
        """The methods, composed."""
        return methods.compose(self.config)

    @cached_property
    def device(self) -> torch.device:
        """Where the arithmetic happens; messages and the server's state stay on the CPU."""
        return plan_device(self.config)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """The names of the parameters that have gradients; the others are buffers or frozen."""
        return tuple(name for name, parameter in self.module.named_parameters() if parameter.requires_grad)

    @cached_property
    def matrices(self) -> frozenset[str]:
        """The weights of linear layers. Lying by columns, they multiply a small batch several times faster on a CPU."""
        return frozenset(
            f"{name}.weight".removeprefix(".")
            for name, module in self.module.named_modules()
            if type(module) is nn.Linear and self.device.type == "cpu"
        )

    @cached_property
    def path(self) -> Path:
        """How the run is executed."""
        config = self.config
        epoch = len(self.partition.indices) // len(self.partition)
        seen = config.local_steps * min(config.batch_size, epoch) or config.local_epochs * epoch
        return choose(config, self.module, config.rounds * config.sampled * seen, self.methods)

    @cached_property
    def recorder(self) -> Recorder:
        """What this process has recorded of training steps with this network."""
        return Recorder(on=self.path.record)

    def initial_model(self) -> Tree:
        """The global model before round 1: parameters and persistent buffers by name."""
        persistent = self.module.state_dict().keys()
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        return {name: tensor.detach().cpu().clone() for name, tensor in named.items() if name in persistent}

    def forward(self, weights: Tree, x: Tensor) -> Tensor:
        """Logits of the network with these weights."""
        logits: Tensor = functional_call(self.module, weights, (x,))
        return logits

    @torch.no_grad()
    def predict(self, model: Tree, x: Tensor) -> Tensor:
        """Logits of any number of samples, in evaluation mode."""
        self.module.eval()
        weights = tree.to(model, self.device)
        return torch.cat([self.forward(weights, part) for part in torch.split(x, CHUNK)])

    def features(self, weights: Tree, x: Tensor) -> Tensor:
        """The vectors that the head of a `models.Classifier` sees."""
        return self._part("features", weights, x)

    def head(self, weights: Tree, z: Tensor) -> Tensor:
        """Logits of such vectors."""
        return self._part("head", weights, z)

    def _part(self, name: str, weights: Tree, x: Tensor) -> Tensor:
        own = {full.removeprefix(f"{name}."): tensor for full, tensor in weights.items() if full.startswith(f"{name}.")}
        out: Tensor = functional_call(self.module.get_submodule(name), own, (x,))
        return out

    @torch.no_grad()
    def loss_on(self, weights: Tree, x: Tensor, y: Tensor) -> float:
        """The mean loss of a model on some samples, without a trace in the module's mode or buffers."""
        before = self.module.training
        self.module.eval()
        loss = F.cross_entropy(self.forward(weights, x), y)
        self.module.train(before)
        return float(loss)

    def rows(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Samples of the training split, normalised, on the device."""
        index = torch.from_numpy(rows)
        x = self.dataset.normalize(self.dataset.ready.index_select(0, index).to(self.device))
        return x, self.dataset.train_y[index].to(self.device)

    def client_data(self, client: int) -> tuple[Tensor, Tensor]:
        """One client's samples and labels."""
        return self.rows(self.partition[client])

    def server_data(self) -> tuple[Tensor, Tensor]:
        """The samples that the server holds, of which no client has any."""
        return self.rows(self.server_rows)

    def evaluation_size(self) -> int:
        """Samples in the split that accuracy is measured on."""
        return len(self.validation_rows) if self.config.evaluate == "validation" else len(self.dataset.test_y)

    def evaluation_data(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """A slice of the split that accuracy is measured on."""
        if self.config.evaluate == "validation":
            return self.rows(self.validation_rows[start:stop])
        x = self.dataset.normalize(self.dataset.test_x[start:stop].to(self.device))
        return x, self.dataset.test_y[start:stop].to(self.device)

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of the data, the split and the network's layout, so that a run is never resumed with others."""
        hasher = hashlib.blake2b(digest_size=16)
        layout = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in self.module.state_dict().items()}
        hasher.update(str(sorted(layout.items())).encode())
        some = [x[:: max(1, len(x) // 64)].contiguous().numpy() for x in (self.dataset.train_x, self.dataset.test_x)]
        for array in (
            self.dataset.train_y.numpy(),
            self.dataset.test_y.numpy(),
            *some,
            self.partition.indices,
            self.partition.offsets,
        ):
            hasher.update(str(array.shape).encode())
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()

    def check_model(self) -> None:
        """Refuse a network that doesn't fit the data, before round 1."""
        models.check(self.module, self.evaluation_data(0, 1)[0], self.dataset.classes)
        for step in self.methods.steps:
            if step.needs.features and not isinstance(self.module, models.Classifier):
                raise UserError(
                    f"{step.name} looks at the network's features, and {type(self.module).__name__} doesn't say what "
                    "they are: make it a dynafed.models.Classifier, that is head(features(x))"
                )


def plan_device(config: Config) -> torch.device:
    """The configured device, or a clear word that it isn't here."""
    kind = config.device.partition(":")[0]
    try:
        torch.device(config.device)
    except RuntimeError:
        kind = ""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if kind not in present:
        raise UserError(f"device = '{config.device}' is not one of cpu, cuda, cuda:N, mps")
    if not present[kind]:
        raise UserError(f"device = '{config.device}': torch finds none on this machine; take device = cpu")
    return torch.device(config.device)


_load = lru_cache(maxsize=1)(data.load)
"""Several runs on the same data read it once."""


def _carve(
    labels: np.ndarray, rows: np.ndarray, size: int, seeds: Seeds, purpose: str
) -> tuple[np.ndarray, np.ndarray]:
    if not size:
        return rows, rows[:0]
    rest, held = data.carve(labels[rows], size, seeds.rng(purpose))
    return rows[rest], rows[held]

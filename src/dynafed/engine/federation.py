"""What a run is made of before round 1: the problem, who holds which data, the methods, how it is executed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynafed import data, execution, methods, models
from dynafed.config import Config, kernel_choice
from dynafed.data import Dataset, Partition
from dynafed.errors import UserError
from dynafed.execution import ExecutionPlan
from dynafed.methods import ClientView, Composition, ServerContext, ServerRuntime
from dynafed.problem import Problem
from dynafed.seeds import Seeds
from dynafed.tracing import StepTracer
from dynafed.transforms import TransformChain
from dynafed.tree import Tree


@dataclass(frozen=True)
class ClientSide:
    """What a client's machine has: the config, the methods, the problem, and how to compute. No data."""

    config: Config
    methods: Composition
    transforms: TransformChain
    problem: Problem
    execution: ExecutionPlan


@dataclass(frozen=True)
class ServerSide:
    """What the server's machine has: the same, and its own samples. Nothing leads to a client's data."""

    config: Config
    methods: Composition
    transforms: TransformChain
    problem: Problem
    data: tuple[Tensor, Tensor] | None = None
    """The samples that the server holds (normalized, on the device) and their labels; of no client."""

    def context(self, round_num: int, global_model: Tree, runtime: ServerRuntime) -> ServerContext:
        """What the methods' server halves see at the beginning of a round."""
        return ServerContext(self.problem, round_num, global_model, self.data, runtime)


@dataclass(frozen=True)
class Federation:
    """A simulated federation: all of its data, both sides, and the execution plan. It never changes during a run."""

    config: Config
    dataset: Dataset
    partition: Partition
    server_rows: np.ndarray
    validation_rows: np.ndarray
    methods: Composition
    problem: Problem
    execution: ExecutionPlan

    @classmethod
    def create(
        cls,
        config: Config,
        *,
        model: models.Factory | None = None,
        train: tuple[Any, Any] | None = None,
        test: tuple[Any, Any] | None = None,
        clients: Sequence[Any] | None = None,
    ) -> Federation:
        """Load or take the data, split it, build the network, decide how to execute it; all by the config's seed."""
        config = config.replace()  # one that was built by hand is checked here
        device = resolve_device(config)
        config, dataset = _dataset(config, train, test)
        if model is not None:
            config = config.replace(model="custom")
        seeds = Seeds(config.seed)
        config, partition, server_rows, validation_rows = _split(config, dataset, clients, seeds)
        composition = methods.compose(config)
        with seeds.torch_seeded("model"):
            module = models.build(config, dataset.shape, dataset.classes, model).to(device)
            # Still under the key: lazy layers get their weights in this first use.
            sample = dataset.test_x[:1] if config.evaluate == "test" else dataset.train_x[validation_rows[:1]]
            models.check(module, dataset.normalize(sample.to(device)), dataset.classes)
        _check_features(module, composition)
        epoch = len(partition.indices) // len(partition)
        samples = config.local_steps * min(config.batch_size, epoch) or config.local_epochs * epoch
        total = config.rounds * config.sampled * samples
        plan, network = execution.resolve(config, module, total, composition, kernel_choice(config))
        # What was chosen stays, also for whoever resumes the run with more rounds.
        config = config.replace(kernels="own" if plan.kernels else "torch")
        tracer = StepTracer(on=plan.trace)
        problem = Problem(dataset.shape, dataset.classes, len(partition), module, network, seeds, device, tracer)
        return cls(config, dataset, partition, server_rows, validation_rows, methods.compose(config), problem, plan)

    @cached_property
    def client_side(self) -> ClientSide:
        """What a client's machine has."""
        return ClientSide(self.config, self.methods, TransformChain.of(self.config), self.problem, self.execution)

    @cached_property
    def server_side(self) -> ServerSide:
        """What the server's machine has."""
        held = self.training_rows(self.server_rows) if len(self.server_rows) else None
        return ServerSide(self.config, self.methods, TransformChain.of(self.config), self.problem, held)

    def client(self, client: int) -> ClientView:
        """One client with its own data."""
        return ClientView(client, self.problem, *self.training_rows(self.partition[client]))

    def has_data(self, client: int) -> bool:
        """Whether a client holds any samples."""
        return len(self.partition[client]) > 0

    def evaluation_size(self) -> int:
        """Samples in the split that accuracy is measured on."""
        return len(self.validation_rows) if self.config.evaluate == "validation" else len(self.dataset.test_y)

    def evaluation_data(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """A slice of the split that accuracy is measured on."""
        if self.config.evaluate == "validation":
            return self.training_rows(self.validation_rows[start:stop])
        device = self.problem.device
        x = self.dataset.normalize(self.dataset.test_x[start:stop].to(device))
        return x, self.dataset.test_y[start:stop].to(device)

    def training_rows(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Samples of the training split, normalized, on the device, and their labels."""
        index, device = torch.from_numpy(rows), self.problem.device
        x = self.dataset.normalize(self.dataset.ready.index_select(0, index).to(device))
        return x, self.dataset.train_y[index].to(device)

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of the data, the split and the network's layout, so that a run is never resumed with others."""
        hasher = hashlib.blake2b(digest_size=16)
        state = self.problem.model.state_dict()
        layout = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in state.items()}
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


def resolve_device(config: Config) -> torch.device:
    """The configured device; refused if it isn't here."""
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


def _dataset(config: Config, train: tuple[Any, Any] | None, test: tuple[Any, Any] | None) -> tuple[Config, Dataset]:
    """The data that were given, or those that the config names."""
    if (train is None) != (test is None):
        raise UserError("give both train=(x, y) and test=(x, y), or neither")
    if train is not None and test is not None:
        return config.replace(dataset="custom"), data.from_arrays(train, test)
    if config.dataset == "custom":
        raise UserError("dataset = 'custom' stands for arrays given in Python: pass train= and test= again")
    dataset = _load(config.dataset, config.data_folder())
    if config.data_dir:
        config = config.replace(data_dir=str(config.data_folder()))
    return config, dataset


def _split(
    config: Config, dataset: Dataset, clients: Sequence[Any] | None, seeds: Seeds
) -> tuple[Config, Partition, np.ndarray, np.ndarray]:
    """Who holds which rows of the training split: the clients, the server, the validation set."""
    labels = dataset.train_y.numpy()
    free = np.arange(len(labels))
    if clients is not None:
        given = data.partition_from_lists(clients, len(labels), allow_empty=config.min_samples == 0)
        config = config.replace(clients=len(given), partition="custom")
        free = np.setdiff1d(free, given.indices)
        if config.server_samples + config.validation_samples > len(free):
            raise UserError(
                f"clients=[...] leaves {len(free)} samples: too few for server_samples = {config.server_samples} "
                f"and validation_samples = {config.validation_samples}"
            )
    rest, server_rows = _carve(labels, free, config.server_samples, seeds, "server")
    rest, validation_rows = _carve(labels, rest, config.validation_samples, seeds, "validation")
    if clients is not None:
        return config, given, server_rows, validation_rows
    if config.partition == "custom":
        raise UserError("partition = 'custom' stands for index lists given in Python: pass clients= again")
    shares = data.make_partition(
        config.partition,
        labels[rest],
        config.clients,
        alpha=config.alpha,
        classes_per_client=config.classes_per_client,
        min_samples=config.min_samples,
        rng=seeds.rng("partition"),
    )
    return config, Partition(rest[shares.indices], shares.offsets), server_rows, validation_rows


def _carve(
    labels: np.ndarray, rows: np.ndarray, size: int, seeds: Seeds, purpose: str
) -> tuple[np.ndarray, np.ndarray]:
    if not size:
        return rows, rows[:0]
    rest, held = data.carve(labels[rows], size, seeds.rng(purpose))
    return rows[rest], rows[held]


def _check_features(module: torch.nn.Module, composition: Composition) -> None:
    """Refuse a network without features where a method needs them."""
    for step in composition.steps:
        if step.needs.features and not isinstance(module, models.Classifier):
            raise UserError(
                f"{step.name} looks at the network's features, and {type(module).__name__} doesn't say what "
                "they are: make it a dynafed.models.Classifier, that is head(features(x))"
            )


@dataclass(frozen=True)
class Cohort:
    """The clients sampled in one attempt at a round."""

    working: list[tuple[int, float]]
    """Each client that will send an update, with the share of its steps that it does; in ascending order."""
    dropped: list[int]


def sample_clients(federation: Federation, round_num: int, attempt: int = 0) -> Cohort:
    """Draw a round's clients without replacement; the cost doesn't depend on how many there are in all."""
    config, seeds = federation.config, federation.problem.seeds
    chosen = seeds.rng("sample", round_num, attempt).choice(
        federation.problem.clients, config.sampled, replace=False, shuffle=False
    )
    working, dropped = [], []
    for client in sorted(int(client) for client in chosen):
        fate = seeds.rng("fate", round_num, attempt, client).random(3)
        slow = fate[1] < config.stragglers
        fails = fate[0] < config.dropout or (slow and config.straggler_policy == "drop")
        if fails or not federation.has_data(client):
            dropped.append(client)
        else:
            working.append((client, float(fate[2]) if slow else 1.0))
    return Cohort(working, dropped)

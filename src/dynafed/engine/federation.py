"""What a run is made of before round 1: the problem, who holds which data, the methods, how it is executed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynafed import data, execution, methods, models
from dynafed.attacks import Attack
from dynafed.config import Config, kernel_choice
from dynafed.data import FederatedData, Samples, Schema
from dynafed.errors import UserError
from dynafed.execution import ExecutionPlan
from dynafed.methods import ClientView, Composition, ServerContext, ServerRuntime
from dynafed.problem import Problem
from dynafed.seeds import Seeds
from dynafed.stages import stage
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
    attack: Attack | None = None
    """What some clients do, in an experiment on robustness."""


@dataclass(frozen=True)
class ServerSide:
    """What the server's machine has: the same, and its own samples. Nothing leads to a client's data."""

    config: Config
    methods: Composition
    transforms: TransformChain
    problem: Problem
    data: tuple[Tensor, Tensor] | None = None
    """The samples that the server holds (normalized, on the device) and their labels; of no client."""
    client_size: Callable[[int], int | None] = lambda client: None
    """How many samples a client holds, if the server knows."""

    def context(self, round_num: int, global_model: Tree, runtime: ServerRuntime) -> ServerContext:
        """What the methods' server halves see at the beginning of a round."""
        return ServerContext(self.problem, round_num, global_model, self.data, runtime)


@dataclass(frozen=True)
class Federation:
    """A simulated federation: all of its data, both sides, and the execution plan. It never changes during a run."""

    config: Config
    data: FederatedData
    methods: Composition
    problem: Problem
    execution: ExecutionPlan

    @classmethod
    def create(
        cls,
        config: Config,
        *,
        model: models.Factory | None = None,
        train: Any = None,
        test: Any = None,
        clients: Any = None,
        server: Any = None,
        classes: int | Sequence[Any] | None = None,
        shape: Sequence[int] | None = None,
        target: str = "",
    ) -> Federation:
        """Load or take the data, split it, build the network, decide how to execute it; all by the config's seed."""
        # One that was built by hand is checked here.
        config = config.replace(**data.data_changes(classes, shape, target))
        device = resolve_device(config)
        seeds = Seeds(config.seed)
        if model is not None:
            config = config.replace(model="custom")
        given = data.Given(train, test, clients, server)
        config, samples = data.federated_data(config, seeds, given, integers=models.takes_integers(config.model))
        return cls.of(config, samples, seeds, device, model)

    @classmethod
    def of(
        cls,
        config: Config,
        samples: FederatedData,
        seeds: Seeds,
        device: torch.device,
        model: models.Factory | None = None,
    ) -> Federation:
        """A federation on these samples: build the network, decide how to execute it."""
        stage("building the network")
        schema = samples.schema
        composition = methods.compose(config)
        with seeds.torch_seeded("model"):
            module = models.build(config, schema.shape, schema.classes, model).to(device)
            # Still under the key: lazy layers get their weights in this first use.
            sample = torch.zeros(1, *schema.shape, dtype=schema.dtype, device=device)
            models.check(module, schema.normalize(sample), schema.classes)
        _check_features(module, composition)
        epoch = samples.mean_client_size()
        each = config.local_steps * min(config.batch_size, epoch) or config.local_epochs * epoch
        total = config.rounds * config.sampled * each
        plan, network = execution.resolve(config, module, total, composition, kernel_choice(config))
        # What was chosen stays, also for whoever resumes the run with more rounds.
        config = config.replace(kernels="own" if plan.kernels else "torch")
        tracer = StepTracer(on=plan.trace)
        clients = samples.num_clients()
        problem = Problem(schema.shape, schema.classes, clients, module, network, seeds, device, tracer)
        return cls(config, samples, methods.compose(config), problem, plan)

    @property
    def schema(self) -> Schema:
        """What the samples look like."""
        return self.data.schema

    @cached_property
    def client_side(self) -> ClientSide:
        """What a client's machine has."""
        transforms = TransformChain.of(self.config)
        return ClientSide(self.config, self.methods, transforms, self.problem, self.execution, self.attack)

    @cached_property
    def attack(self) -> Attack | None:
        """What some of the clients do instead of training honestly, if the config says so."""
        return Attack.of(self.config, self.problem, self.client)

    @cached_property
    def server_side(self) -> ServerSide:
        """What the server's machine has."""
        held = self.data.split("server")
        ready = (
            (self.schema.normalize(held[0].to(self.problem.device)), held[1].to(self.problem.device)) if held else None
        )
        transforms = TransformChain.of(self.config)
        return ServerSide(self.config, self.methods, transforms, self.problem, ready, self.data.client_size)

    def client(self, client: int) -> ClientView:
        """One client with its own data."""
        return ClientView(client, self.problem, *self.data.client(client, self.problem.device))

    def has_data(self, client: int) -> bool:
        """Whether a client holds any samples, as far as that is known before they are read."""
        return self.data.client_size(client) != 0

    @cached_property
    def _evaluated(self) -> Samples:
        held = self.data.split(self.config.evaluate)
        if held is None:
            raise UserError(f"evaluate = '{self.config.evaluate}': there are no such samples")
        return held

    def evaluation_size(self) -> int:
        """Samples in the split that accuracy is measured on."""
        return len(self._evaluated[1])

    def evaluation_data(self, start: int, stop: int) -> Samples:
        """A slice of the split that accuracy is measured on, normalized, on the device."""
        x, y = self._evaluated
        return self.schema.to_input((x[start:stop], y[start:stop]), self.problem.device)

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of the data, the split and the network's layout, so that a run is never resumed with others."""
        hasher = hashlib.blake2b(digest_size=16)
        state = self.problem.model.state_dict()
        layout = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in state.items()}
        hasher.update(str(sorted(layout.items())).encode())
        for array in self.data.fingerprint():
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

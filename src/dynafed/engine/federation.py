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
from dynafed.tasks import LossFunction, Task, check_loss, config_targets, loss_function
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
        loss: LossFunction | str | None = None,
    ) -> Federation:
        """Load or take the data, split it, build the network, decide how to execute it; all by the config's seed."""
        # One that was built by hand is checked here.
        config = config.replace(**data.data_changes(classes, shape, target))
        device = resolve_device(config)
        seeds = Seeds(config.seed)
        if model is not None:
            config = config.replace(model="custom")
        config, function = loss_function(config, loss)
        given, integers = data.Given(train, test, clients, server), models.takes_integers(config.model)
        targets = config_targets(config)
        config, samples = data.federated_data(config, seeds, given, integers=integers, targets=targets)
        return cls.of(config, samples, seeds, device, model, function)

    @classmethod
    def of(
        cls,
        config: Config,
        samples: FederatedData,
        seeds: Seeds,
        device: torch.device,
        model: models.Factory | None = None,
        loss: LossFunction | None = None,
    ) -> Federation:
        """A federation on these samples: build the network, decide how to execute it.

        Without `loss`, it is the one that the config names.
        """
        stage("building the network")
        schema = samples.schema
        task = Task(config.loss, schema.targets, loss or loss_function(config)[1])
        composition = methods.compose(config)
        _check_task(task, composition)
        with seeds.torch_seeded("model"):
            module = models.build(config, schema.shape, schema.classes, model).to(device)
            # Still under the key: lazy layers get their weights in this first use.
            sample = schema.normalize(torch.zeros(1, *schema.shape, dtype=schema.dtype, device=device))
            outputs = models.check(module, sample, schema.classes, schema.targets)
        check_loss(task, outputs)
        pairs = models.needs_pairs(module, sample)
        if pairs and config.batch_size == 1:
            raise UserError("batch_size = 1: this network has a BatchNorm that can't be trained on one sample; take 2")
        _check_features(module, composition)
        _check_sample_gradients(module, composition, sample)
        epoch = samples.mean_client_size()
        each = config.local_steps * min(config.batch_size, epoch) or config.local_epochs * epoch
        total = config.rounds * config.sampled * each
        plan, network = execution.resolve(config, module, total, composition, kernel_choice(config), sample)
        # What was chosen stays, also for whoever resumes the run with more rounds.
        config = config.replace(kernels="own" if plan.kernels else "torch", kernels_version=plan.version)
        tracer = StepTracer(on=plan.trace)
        clients = samples.num_clients()
        problem = Problem(
            schema.shape,
            schema.classes,
            clients,
            module,
            network,
            seeds,
            device,
            tracer,
            task,
            pairs,
            plan.fused_epochs,
        )
        made = cls(config, samples, methods.compose(config), problem, plan)
        _ = made.attack  # one that can't be is refused here
        return made

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
        ready = self.schema.to_input(held, self.problem.device) if held else None
        transforms = TransformChain.of(self.config)
        return ServerSide(self.config, self.methods, transforms, self.problem, ready, self.data.client_size)

    def client(self, client: int) -> ClientView:
        """One client with its own data: those that it trains on."""
        x, y = self.data.client(client, self.problem.device)
        if self.config.evaluate == "clients":
            rows, _ = self._hold_out(client, len(y))
            x, y = x[rows], y[rows]
        return ClientView(client, self.problem, x, y)

    def held_out(self, client: int) -> Samples:
        """The samples that a client keeps for evaluation; none if it has only one."""
        x, y = self.data.client(client, self.problem.device)
        _, rows = self._hold_out(client, len(y))
        return x[rows], y[rows]

    def _hold_out(self, client: int, size: int) -> tuple[Tensor, Tensor]:
        """The rows of a client that it trains on, and those that it holds out: at least one of each, if it has two."""
        held = min(max(1, round(self.config.holdout * size)), size - 1)
        order = self.problem.seeds.rng("holdout", client).permutation(size)
        return torch.from_numpy(np.sort(order[held:])), torch.from_numpy(np.sort(order[:held]))

    def has_data(self, client: int) -> bool:
        """Whether a client holds any samples, as far as that is known before they are read."""
        return self.data.client_size(client) != 0

    @cached_property
    def _evaluated(self) -> Samples | None:
        return self.data.split("validation" if self.config.evaluate == "validation" else "test")

    def evaluation_size(self) -> int:
        """Samples in the split that the server evaluates on: validation or test; 0 if it has none."""
        return 0 if self._evaluated is None else len(self._evaluated[1])

    def evaluation_data(self, start: int, stop: int) -> Samples:
        """A slice of that split, normalized, on the device."""
        assert self._evaluated is not None
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


def _check_task(task: Task, composition: Composition) -> None:
    """Refuse a method that needs classes where there are none."""
    for step in composition.steps:
        if step.needs.classes and task.targets != "classes":
            raise UserError(f"{step.name} needs classes, and loss = '{task.loss}' is for {task.targets}: take another")


def _check_sample_gradients(module: torch.nn.Module, composition: Composition, x: Tensor) -> None:
    """Refuse a method that needs the gradient by the samples where there is none, found by trying."""
    needing = [step.name for step in composition.steps if step.needs.sample_gradients]
    if needing and not models.has_sample_gradient(module, x):
        what = "the network's outputs have no" if x.is_floating_point() else "samples that are whole numbers have no"
        raise UserError(
            f"{needing[0]} needs the gradient of the loss by the samples, and {what} gradient: take another method, "
            "such as fedavg+average"
        )


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

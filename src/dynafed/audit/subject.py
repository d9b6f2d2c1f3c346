"""The run that is audited, and runs like it with other data."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafed import data, tree
from dynafed.callbacks import Record
from dynafed.data.federated import SplitDataset
from dynafed.engine import checkpoint
from dynafed.engine.checkpoint import RunState
from dynafed.engine.federation import Federation, sample_clients
from dynafed.engine.processes import ProcessBackend
from dynafed.engine.run import one_round
from dynafed.engine.server import server_broadcast, server_update
from dynafed.engine.trust import load_run_config
from dynafed.errors import UserError
from dynafed.methods import ServerRuntime
from dynafed.secure_aggregation import invite
from dynafed.seeds import Seeds
from dynafed.stages import stage
from dynafed.synthesis.refine import train_on
from dynafed.synthesis.synthetic import SyntheticData
from dynafed.tree import Tree

SCRATCH = ("adam", 1e-3, 300)
"""How a network is trained on D_syn alone: optimizer, rate, steps."""
FINAL, ALONE = "the final model", "a network trained on D_syn alone"
"""What an attacker may hold, among others."""


@dataclass(frozen=True)
class Subject:
    """A finished run with what its server and clients had; the auditor knows everything."""

    path: Path
    federation: Federation
    state: RunState
    average: Tree
    """The average of one more round's updates, before any refinement."""
    refined: Tree
    """The model that the server made of it."""
    synthetic: SyntheticData | None

    @property
    def split(self) -> SplitDataset:
        """Its data."""
        assert isinstance(self.federation.data, SplitDataset)
        return self.federation.data

    @property
    def seeds(self) -> Seeds:
        """The run's seeds; the audit has purposes of its own."""
        return self.federation.problem.seeds

    def models(self) -> dict[str, Tree]:
        """What an attacker may hold, by name."""
        return _held(self.federation, self.state, self.average, self.refined, self.synthetic)

    def members(self, count: int, purpose: str) -> np.ndarray:
        """Some rows of the training split that clients hold."""
        held = self.split.partition.indices
        return np.sort(self.seeds.rng("audit", purpose).choice(held, min(count, len(held)), replace=False))

    def training(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Rows of the training split, as the network takes them."""
        dataset, index = self.split.dataset, torch.from_numpy(rows)
        return dataset.schema.to_input((dataset.train_x[index], dataset.train_y[index]), self.federation.problem.device)

    def held_out(self, rows: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """The test split, or rows of it."""
        dataset = self.split.dataset
        index = slice(None) if rows is None else torch.from_numpy(rows)
        return dataset.schema.to_input((dataset.test_x[index], dataset.test_y[index]), self.federation.problem.device)

    def losses(self, model: Tree, x: Tensor, y: Tensor) -> np.ndarray:
        """The loss of each sample."""
        logits = self.federation.problem.predict(model, x)
        return F.cross_entropy(logits, y, reduction="none").double().cpu().numpy()


def load_subject(path: str | Path, trust: bool = False) -> Subject:
    """A run by its folder; its data must come from its config."""
    path = Path(path)
    federation = Federation.create(load_run_config(path, trust).replace(workers=1, watch=[]))
    if not isinstance(federation.data, SplitDataset):
        raise UserError(
            f"{path} can't be audited: its clients bring their own data, and the audit needs a whole dataset"
        )
    state = checkpoint.load(path, federation, ProcessBackend(federation))
    if not state.round:
        raise UserError(f"{path} has no checkpoint: it can't be audited")
    average, refined = _next_round(federation, state)
    file = path / "synthetic.safetensors"
    schema = federation.schema
    synthetic = SyntheticData.load(file, schema.shape, schema.classes) if file.is_file() else None
    return Subject(path, federation, state, average, refined, synthetic)


def _next_round(federation: Federation, state: RunState) -> tuple[Tree, Tree]:
    """The average of one more round's updates, and the model that the server makes of it."""
    config, side, number = federation.config, federation.server_side, state.round + 1
    if "dp" in state.server:  # this round is never released, so it costs nothing of a budget that may be spent
        ledger = state.server["dp"] | {"releases": torch.tensor(0)}
        state = dataclasses.replace(state, server=state.server | {"dp": ledger})
    cohort = sample_clients(federation, number)
    sampled = [*cohort.dropped, *(client for client, _ in cohort.working)]
    broadcast = server_broadcast(side, number, state.model, state.server)
    broadcast = invite(config, federation.problem.seeds, broadcast, sampled, 0)
    with ProcessBackend(federation) as backend:
        trained = backend.train(broadcast, cohort.working, state.clients.load)
        outcome = server_update(side, broadcast, state.server, (update for update, _ in trained), ServerRuntime())
    return outcome.average, outcome.model


def _held(
    federation: Federation, state: RunState, average: Tree, refined: Tree, synthetic: SyntheticData | None
) -> dict[str, Tree]:
    found = {"the average": average}
    if refined is not average:
        found["the refined model"] = refined
    if synthetic is not None:
        found[ALONE] = train_alone(federation, synthetic)
    return found | {FINAL: state.final_model}


def shadow_models(federation: Federation, what: str) -> dict[str, Tree]:
    """What an attacker may hold of a run of this federation, by the names of `Subject.models`."""
    held: dict[str, Tree] = {}

    def note(state: RunState, record: Record) -> None:
        if state.round == federation.config.rounds:
            held.update(_held(federation, state, *_next_round(federation, state), synthetic_of(state)))

    replay(federation, federation.config.rounds, what, note)
    return held


def synthetic_of(state: RunState) -> SyntheticData | None:
    """D_syn as the server keeps it."""
    parts = tree.unnest(state.server.get("dynafed", {}))
    return SyntheticData.from_tree(parts["synthetic"]) if "synthetic" in parts else None


def replay(
    federation: Federation,
    rounds: int,
    what: str,
    on_round: Callable[[RunState, Record], None] = lambda state, record: None,
) -> RunState:
    """The first rounds of a federation, in a folder that goes."""
    backend = ProcessBackend(federation)
    with tempfile.TemporaryDirectory() as folder, backend:
        state = RunState.initial(federation, backend, Path(folder))
        for number in range(rounds):
            stage(what, number, rounds)
            state, record = one_round(federation, state, backend, ServerRuntime())
            on_round(state, record)
    return state


def with_data(subject: Subject, samples: SplitDataset, seed: int | None = None, **changes: object) -> Federation:
    """The same federation with other data."""
    config = subject.federation.config
    changes = {"eval_every": config.rounds, "kernels": "auto", **changes}
    if seed is not None:
        changes["seed"] = seed
    config = config.replace(**changes)
    return Federation.of(config, samples, Seeds(config.seed), subject.federation.problem.device)


def repartitioned(subject: Subject, x: Tensor, y: Tensor, rows: np.ndarray, seed: int) -> SplitDataset:
    """These rows of a larger training split, divided as the config says, by another seed."""
    config, split = subject.federation.config, subject.split
    dataset = dataclasses.replace(split.dataset, train_x=x, train_y=y)
    shares = data.make_partition(
        config.partition if config.partition != "custom" else "dirichlet-balanced",
        y.numpy()[rows],
        split.num_clients(),
        alpha=config.alpha,
        classes_per_client=config.classes_per_client,
        min_samples=config.min_samples,
        rng=Seeds(seed).rng("partition"),
    )
    return dataclasses.replace(split, dataset=dataset, partition=data.Partition(rows[shares.indices], shares.offsets))


def train_alone(federation: Federation, synthetic: SyntheticData) -> Tree:
    """The weights of the initial network after training on D_syn alone."""
    optimizer, rate, steps = SCRATCH
    problem = federation.problem
    start = tree.to(problem.initial_model(), problem.device)
    return train_on(problem.network, start, synthetic, optimizer, rate, steps, rng=problem.seeds.rng("audit-scratch"))

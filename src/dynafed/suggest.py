"""What to try next, from the evidence of one finished run: skew, drift, swings, and steps without an effect.

Each suggestion says what in the run speaks for it, and what was measured that supports it (docs/guide.md). Where
nothing was measured that fits, nothing is suggested.
"""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynafed.config import Config
from dynafed.engine import checkpoint
from dynafed.engine.backend import BACKENDS
from dynafed.engine.evaluation import evaluate
from dynafed.engine.federation import Federation, sample_clients
from dynafed.engine.server import server_broadcast
from dynafed.engine.trust import load_run_config
from dynafed.errors import UserError
from dynafed.methods.fedavg import Mean
from dynafed.optim import ADAMS
from dynafed.report.groups import label_skew
from dynafed.report.load import Run, load_run
from dynafed.synthesis.invariances import find_invariances
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.tree import Tree

LAST = 10
"""Rounds at the end over which the swings are measured."""

CLIENTS = 5
"""Clients whose own models are evaluated."""

FEWEST = 5
"""Evaluated rounds that tell anything."""


@dataclass(frozen=True)
class Evidence:
    """What a run tells."""

    rounds: int
    accuracy: float
    """The model's own, the mean of the last rounds."""
    swings: float
    """How much it changes from round to round, over the last rounds: the deviation that remains without a trend."""
    mean_gain: float | None
    """What the running mean of the models adds to the accuracy; None unless the run has `average`."""
    classes_per_client: float
    """How many classes hold 90 % of a client's samples, at the median over clients."""
    classes_if_even: int
    """The same with evenly spread classes."""
    client_accuracy: float
    """That of a few clients' own models after one more round of local training, before they are averaged."""
    average_accuracy: float
    """That of the average of all clients of that round."""
    null_share: float
    """Share of the squared way between the kept checkpoints along directions that no prediction depends on."""
    optimizer: str
    rounds_for_dynafed: int
    """As many as DynaFed needs to show anything with the run's settings: twice its trajectory."""

    @property
    def skewed(self) -> bool:
        """Whether most clients have at most half of the classes that they would have if all were alike."""
        return self.classes_per_client <= self.classes_if_even / 2

    @property
    def drift(self) -> float:
        """How much worse than their average the clients' own models are: what they forget in a round."""
        return self.average_accuracy - self.client_accuracy


@dataclass(frozen=True)
class Suggestion:
    """Something to try."""

    command: str
    because: str
    """What in the run speaks for it."""
    measured: str
    """What was measured elsewhere that supports it."""


def suggest(path: str | Path, trust: bool = False) -> tuple[Evidence, list[Suggestion]]:
    """What the run in `path` tells, and what to try next; trains the clients of one more round, and changes nothing.

    A folder whose config names parts such as `package.module:Name` is refused unless `trust` is True.
    """
    path = Path(path)
    run = load_run(path) if (path / "config.toml").is_file() else None
    if run is None or not run.finished:
        raise UserError(f"{path} holds no finished run: suggest looks at one")
    if {*str(run.config["method"]).split("+")} - {"fedavg", "average"}:
        raise UserError(f"{path} is a run of {run.config['method']}: suggest looks at one of fedavg or fedavg+average")
    evidence = gather(run, load_run_config(path, trust))
    return evidence, suggestions(evidence, path)


def gather(run: Run, config: Config) -> Evidence:
    """The evidence of a finished run of FedAvg and its config."""
    raw = run.values("accuracy_raw") or run.values("accuracy")
    if len(raw) < FEWEST or run.partition is None:
        raise UserError(f"{run.path} has {len(raw)} evaluated rounds: at least {FEWEST} are needed")
    last, served = raw[-LAST:], run.values("accuracy")[-LAST:]
    skew = label_skew(run.partition)
    federation, clients, average = one_more_round(run.path, config)
    return Evidence(
        rounds=len(run.rounds),
        accuracy=statistics.fmean(last),
        swings=_swings(last),
        mean_gain=statistics.fmean(served) - statistics.fmean(last) if run.values("accuracy_raw") else None,
        classes_per_client=skew["classes"],
        classes_if_even=int(skew["even"]),
        client_accuracy=statistics.fmean(evaluate(federation, model)["accuracy"] for model in clients),
        average_accuracy=evaluate(federation, average)["accuracy"],
        null_share=_null_share(federation, run.path),
        optimizer=federation.config.optimizer,
        rounds_for_dynafed=2 * federation.config.section("dynafed", DynaFedSettings).trajectory,
    )


def one_more_round(path: Path, config: Config) -> tuple[Federation, list[Tree], Tree]:
    """The federation of a run, the models of some clients after one more round, and the average of all of them."""
    federation = Federation.create(config.replace(rounds=config.rounds + 1, callbacks=[]))
    backend = BACKENDS.load("local")(federation, path)
    state = checkpoint.load(path, federation, backend)
    cohort = sample_clients(federation, state.round + 1).working
    broadcast = server_broadcast(federation.server_side, state.round + 1, state.model, state.server)
    models: list[Tree] = []
    mean = Mean(config.weighting)
    with backend:
        for update, _ in backend.train(broadcast, cohort, state.clients.load):
            mean.add(update)
            if len(models) < CLIENTS:
                models.append(dict(update.model))
    return federation, models, mean.mean()


def _null_share(federation: Federation, path: Path) -> float:
    """From the oldest checkpoint that is kept, or the initial model if there is but one, to the newest."""
    problem = federation.problem
    kept = [checkpoint.read_parts(folder)["model"] for folder in sorted((path / "checkpoint").glob("round-*"))]
    start, end = (kept if len(kept) > 1 else [problem.initial_model(), *kept])[:: max(1, len(kept) - 1)]
    way = {name: end[name].double() - start[name].double() for name in problem.trainable}
    return sum(find_invariances(problem.model, problem.shape).shares(way).values())


def suggestions(evidence: Evidence, path: Path) -> list[Suggestion]:
    """What the evidence supports, the cheapest first; nothing for clients that are alike."""
    found = []
    if evidence.swings > SWINGS and evidence.mean_gain is None:
        because = f"the accuracy swings by {100 * evidence.swings:.1f} points; a mean of the last models doesn't follow"
        found.append(Suggestion(_again(path, "fedavg+average"), because, MEASURED["average"]))
    if evidence.skewed and evidence.optimizer in ADAMS and evidence.null_share > NULL_SHARE:
        because = (
            f"{100 * evidence.null_share:.0f} % of the model's squared way has no effect on any prediction: "
            f"{evidence.optimizer} makes every push of a client with few classes equally long"
        )
        command = _again(path, "fedavg+average", "optimizer=sgd", "lr=0.05")
        found.append(Suggestion(command, because, MEASURED["sgd"]))
    if evidence.skewed and evidence.drift > DRIFT:
        apart = (
            f"after local training a client's model has {100 * evidence.client_accuracy:.0f} %, their average "
            f"{100 * evidence.average_accuracy:.0f} %: clients forget the classes that they don't have"
        )
        found.append(Suggestion(_again(path, "fedprox+average"), apart, MEASURED["fedprox"]))
        longer = evidence.rounds < evidence.rounds_for_dynafed
        changes = [f"rounds={evidence.rounds_for_dynafed}"] if longer else []
        same = "the same, for clients that must stay as they are; the synthesis costs server time"
        found.append(Suggestion(_again(path, "dynafed+average", *changes), same, MEASURED["dynafed"]))
    return found


SWINGS, NULL_SHARE, DRIFT = 0.01, 0.15, 0.1
"""Less than this speaks for nothing: with clients that are alike there was as much (docs/guide.md)."""

MEASURED = {
    "average": "FashionMNIST, MLP, alpha 0.01, three seeds: 79.1 %, the model itself 70.8 % (docs/guide.md)",
    "sgd": "FashionMNIST, MLP, alpha 0.01, one seed: 81.9 %, with Adam 79.5 % (docs/guide.md)",
    "fedprox": "FashionMNIST, MLP, alpha 0.01, three seeds: 80.8 %, FedAvg's mean 79.1 % (docs/guide.md)",
    "dynafed": "FashionMNIST, MLP, alpha 0.01, three seeds: 80.7 %, FedAvg's mean 79.1 % (docs/guide.md)",
}
"""What supports each suggestion."""


def _again(path: Path, method: str, *changes: str) -> str:
    words: Sequence[str] = [word for change in (f"method={method}", *changes) for word in ("-s", change)]
    return shlex.join(["dynafed", "run", str(path / "config.toml"), *words])


def _swings(accuracies: Sequence[float]) -> float:
    """The deviation of independent draws that would differ as much from one to the next."""
    steps = [after - before for before, after in itertools.pairwise(accuracies)]
    return math.sqrt(statistics.fmean(step**2 for step in steps) / 2)

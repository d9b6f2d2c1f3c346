"""What D_syn adds to the mean of the models, if nothing but the served model is fine-tuned on it.

    DYNAFED_DATA=... python experiments/served_mean.py cpu-fmnist-mlp 0,1,2 [CASE ...]

writes experiments/results/served-mean-<preset>.json, a row for each seed and case; rows that are there are not run
again. FedAvg runs once for each seed at the preset's protocol, on validation data (kept in runs/). Then, at rounds 40
and 200: the accuracy of the model and of the mean of the last 20, as they are and after fine-tuning on a D_syn. Each
number is the mean over the five rounds that end there. D_syn is made in 300 iterations
- from rounds 1 to 20, or from the last 20 of the five rounds before (`late`), the rest as in the preset;
- with l2 and a single rate, or with the quotient distance and rates per tensor;
- from the models, or from the means of five of them (`smooth`).
Bounds: fine-tuning on as many real samples (5 draws of training samples, balanced), and on a D_syn that is made from
the first 20 rounds of FedAvg on an IID split (`iid`); ten epochs of training on all clients' samples in one place.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ablation import mean, trajectory

from dynafed import Config
from dynafed.engine.evaluation import evaluate
from dynafed.engine.federation import Federation
from dynafed.synthesis import DynaFedSettings, SyntheticData, finetune, synthesize
from dynafed.tree import Tree

ENDS, WINDOW, LENGTH, ITERATIONS = (40, 200), 20, 20, 300
VALIDATION = {"validation_samples": 5000, "evaluate": "validation"}
SINGLE = {"distance": "l2", "inner_rates": "single"}
TENSOR = {"distance": "quotient", "inner_rates": "tensor"}
BUDGETS = {"as in the preset": {}, "20 steps at 1e-4": {"finetune_steps": 20, "finetune_lr": 1e-4}}


def smooth(models: list[Tree], width: int = 5) -> list[Tree]:
    """The mean of each model and those before it."""
    return [mean(models[max(0, number - width + 1) : number + 1]) for number in range(len(models))]


def real_samples(federation: Federation, count: int, draw: int) -> SyntheticData:
    """Training samples, equally many of each class, in the place of D_syn."""
    classes, rng = federation.schema.classes, federation.problem.seeds.rng("real samples", draw)
    x, y = map(torch.cat, zip(*(federation.data.client(c) for c in range(federation.data.num_clients())), strict=True))
    order = torch.from_numpy(rng.permutation(len(y)))
    rows = torch.cat([order[y[order] == label][: count // classes] for label in range(classes)])
    return SyntheticData(x[rows], 30.0 * torch.nn.functional.one_hot(y[rows], classes), 1.0, {})


class Study:
    """One seed's FedAvg run, and what is measured on it."""

    def __init__(self, preset: str, seed: int, name: str = "fedavg", **changes: Any) -> None:
        self.preset, self.seed = preset, seed
        self.config = self.load(changes)
        self.settings = replace(self.config.section("dynafed", DynaFedSettings), iterations=ITERATIONS)
        self.federation = Federation.create(self.config)
        self.models = self.path(name, self.config)
        self.means = [mean(self.models[max(0, n - WINDOW + 1) : n + 1]) for n in range(len(self.models))]

    def load(self, changes: dict[str, Any]) -> Config:
        """The config of a FedAvg run that keeps every model."""
        keep = {"method": "fedavg", "seed": self.seed, "checkpoint_every": 1, "keep_checkpoints": 1000, "workers": 1}
        return Config.load(self.preset, keep | VALIDATION | changes)

    def path(self, name: str, config: Config) -> list[Tree]:
        """The global models of a run, which is made if need be."""
        return trajectory(config, Path("runs") / f"served-mean-{self.preset}" / f"{name}-{self.seed}")

    def synthesize(
        self, models: list[Tree], changes: dict[str, Any], seed: int | None = None
    ) -> tuple[SyntheticData, float]:
        """D_syn from these models, and the matching loss of the last 50 iterations; with the run's seed or another."""
        schema, losses = self.federation.schema, []
        synthetic = synthesize(
            self.federation.problem.model,
            models,
            schema.shape,
            schema.classes,
            replace(self.settings, **changes),
            self.seed if seed is None else seed,
            on_iteration=lambda iteration, loss, x: losses.append(loss),
        )
        return synthetic, statistics.fmean(losses[-50:])

    def accuracy(self, end: int, models: list[Tree], synthetic: SyntheticData | None, **changes: Any) -> float:
        """Over five rounds, after fine-tuning on D_syn if there is one."""
        problem, settings = self.federation.problem, replace(self.settings, **changes)
        found = []
        for number in range(end - 5, end):
            model = models[number]
            if synthetic is not None:
                model = finetune(problem.model, model, synthetic, settings, problem.seeds, number + 1)
            found.append(evaluate(self.federation, model)["accuracy"])
        return statistics.fmean(found)

    def both(self, end: int, synthetic: SyntheticData | None, **changes: Any) -> dict[str, float]:
        """Of the models, and of their means."""
        return {
            name: round(self.accuracy(end, models, synthetic, **changes), 5)
            for name, models in (("model", self.models), ("mean", self.means))
        }

    def by_budget(self, end: int, synthetic: SyntheticData) -> dict[str, Any]:
        """The same, for each fine-tuning budget."""
        return {budget: self.both(end, synthetic, **steps) for budget, steps in BUDGETS.items()}


def cases(study: Study, known: dict[str, Any], wanted: tuple[str, ...]) -> Any:
    """The name and the row of each case that is wanted (all, if none is named) and not known, one after the other."""
    ends = [end for end in ENDS if end <= len(study.models)]

    def new(name: str) -> bool:
        return name in (wanted or [name]) and f"{name}; seed {study.seed}" not in known

    if new("as they are"):
        yield "as they are", {end: study.both(end, None) for end in ends}
    for kind, changes in (("l2", SINGLE), ("quotient", TENSOR)):
        if new(f"early, {kind}"):
            synthetic, loss = study.synthesize(study.models[:LENGTH], changes)
            yield f"early, {kind}", {"matching_loss": loss} | {end: study.by_budget(end, synthetic) for end in ends}
    for name, models in (("late", study.models), ("late, smooth", smooth(study.models))):
        if new(name):
            row = {}
            for end in ends:
                synthetic, loss = study.synthesize(models[end - 5 - LENGTH : end - 5], TENSOR)
                row[end] = {"matching_loss": loss} | study.by_budget(end, synthetic)
            yield name, row
    if new("real samples"):
        draws = [real_samples(study.federation, study.settings.samples, draw) for draw in range(5)]
        row = {}
        for end in ends:
            found = [study.both(end, draw) for draw in draws]
            row[end] = {part: statistics.fmean(each[part] for each in found) for part in ("model", "mean")}
        yield "real samples", row
    if new("iid"):
        rounds = {"partition": "iid", "rounds": LENGTH}
        models = study.path("iid", study.load(rounds))
        synthetic, loss = study.synthesize(models, TENSOR)
        accuracy = round(evaluate(study.federation, models[-1])["accuracy"], 5)
        yield (
            "iid",
            {
                "matching_loss": loss,
                "accuracy of the IID run": accuracy,
                **{end: study.both(end, synthetic) for end in ends},
            },
        )
    if new("centralized"):
        epochs = study.load({"partition": "iid", "clients": 1, "participation": 1.0, "rounds": 10})
        models = study.path("centralized", epochs)
        yield "centralized", {"10 epochs": round(evaluate(study.federation, models[-1])["accuracy"], 5)}


def main(preset: str, seeds: str, *wanted: str) -> None:
    """Run what is missing."""
    file = Path(__file__).parent / "results" / f"served-mean-{preset}.json"
    rows = json.loads(file.read_text()) if file.exists() else {}
    torch.set_num_threads(1)
    for seed in map(int, seeds.split(",")):
        for name, row in cases(Study(preset, seed), rows, wanted):
            rows[f"{name}; seed {seed}"] = row
            file.write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{name}; seed {seed}", json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

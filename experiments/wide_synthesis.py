"""How the synthesis at the paper's width was set, without a look at the test split.

    DYNAFED_DATA=... python experiments/wide_synthesis.py RUN ITERATIONS KEY=VALUE ...

RUN is a folder of `fedavg+average` from `dynafed reproduce table1 --scale paper`: it keeps the models of rounds 1 to 20
in `shared/` and the last 20 in its checkpoint. D_syn is made from the first with these settings of section `dynafed`;
two of the last are fine-tuned on it. Accuracy is that on 3,000 of the clients' training samples. Writes a row to
experiments/results/wide-synthesis.json. The rows there were made when RUN had done 42 rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from dynafed import Config, tree
from dynafed.config import parse_override
from dynafed.engine import checkpoint
from dynafed.engine.federation import Federation
from dynafed.synthesis import DynaFedSettings, finetune, synthesize
from dynafed.tree import Tree

SAMPLES = 3000
BUDGETS = {"50 steps at 3e-4": (50, 3e-4), "20 steps at 1e-4": (20, 1e-4), "20 steps at 1e-3": (20, 1e-3)}


def kept_models(folder: Path) -> list[Tree]:
    """The global models in the newest checkpoint of a folder, oldest first."""
    newest = max(folder.glob("round-*"))
    models = tree.unnest(tree.unnest(checkpoint.read_parts(newest)["server"])["average"])
    return [models[number] for number in sorted(models)]


def main(path: str, iterations: str, *settings: str) -> None:
    """Run one case."""
    torch.set_num_threads(1)
    changes = dict(parse_override(f"dynafed.{setting}") for setting in settings)
    config = Config.load(str(Path(path) / "config.toml"), {"method": "dynafed", "workers": 1} | changes)
    federation = Federation.create(config)
    network, schema = federation.problem.model, federation.schema
    clients = (federation.data.client(client) for client in range(federation.data.num_clients()))
    x, y = map(torch.cat, zip(*clients, strict=True))
    drawn = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:SAMPLES]

    def accuracy(model: Tree) -> float:
        with torch.no_grad():
            right = [functional_call(network, model, (x[rows],)).argmax(1) == y[rows] for rows in drawn.split(500)]
        return round(torch.cat(right).float().mean().item(), 4)

    chosen = replace(config.section("dynafed", DynaFedSettings), iterations=int(iterations))
    losses: list[float] = []
    synthetic = synthesize(
        network,
        kept_models(Path(path) / "shared"),
        schema.shape,
        schema.classes,
        chosen,
        config.seed,
        on_iteration=lambda iteration, loss, samples: losses.append(loss),
    )
    later = kept_models(Path(path) / "checkpoint")[1::10]
    row: dict[str, Any] = {
        "matching_loss": [round(statistics.fmean(losses[at : at + 10]), 4) for at in range(1, len(losses), 10)],
        "inner_rates": [float(f"{rate:.3g}") for rate in synthetic.inner_rates],
        "before": [accuracy(model) for model in later],
    }
    for name, (steps, lr) in BUDGETS.items():
        budget = replace(chosen, finetune_steps=steps, finetune_lr=lr)
        tuned = (finetune(network, model, synthetic, budget, federation.problem.seeds, 1) for model in later)
        row[name] = [accuracy(model) for model in tuned]
    file = Path(__file__).parent / "results" / "wide-synthesis.json"
    rows = json.loads(file.read_text()) if file.exists() else {}
    rows[" ".join((*settings, f"iterations={iterations}"))] = row
    file.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])

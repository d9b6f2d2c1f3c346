"""What runs give away, with and without differential privacy: the audits of docs/trust.md.

    python experiments/audits.py runs/audits experiments/results/audit.json
    python experiments/audits.py table experiments/results/audit.json

Each run is made if its folder isn't there, and audited if the JSON doesn't have it. On one core, a run on
cpu-fmnist-mlp takes some two minutes, the others a quarter of one, and an audit as long as `shadows` + 2 of its runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from privacy import CLIP, COMMON, PROBLEMS
from rows import L2

from dynafed import Config
from dynafed.audit import audit
from dynafed.engine.grid import Cell, run_cells

DEMO: dict[str, Any] = L2 | {"method": "dynafed+average", "rounds": 30, "alpha": 0.1}
MANY: dict[str, Any] = COMMON | PROBLEMS["1000 clients"] | {"method": "dynafed+average"}
PRIVATE: dict[str, Any] = {"dp.epsilon": 8.0}
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    # preset, changes, shadow runs, canaries
    "demo": ("demo", DEMO, 4, 10),
    "demo, epsilon 8": ("demo", DEMO | PRIVATE, 4, 10),
    "cpu-fmnist-mlp": ("cpu-fmnist-mlp", {}, 2, 10),
    "cpu-fmnist-mlp, epsilon 8": ("cpu-fmnist-mlp", PRIVATE, 2, 10),
    "1000 clients": ("demo", MANY, 0, 10),
    "1000 clients, epsilon 8": ("demo", MANY | PRIVATE | {"dp.clip": CLIP["1000 clients"]}, 0, 0),
}
MODELS = ("the average", "the refined model", "a network trained on D_syn alone", "the final model")


def main(folder: Path, out: Path) -> None:
    """Run and audit what isn't done; write every audit as soon as it is there."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name, (preset, changes, shadows, canaries) in CASES.items():
        if name in found:
            continue
        config = Config.load(preset, {"workers": 1, "dynafed.evidence": False} | changes)
        path = folder / name.replace(", ", "-").replace(" ", "-")
        ((_, summary),) = run_cells([Cell(name, config, path)])
        assert isinstance(summary, dict)
        kept = {key: summary[key] for key in ("final_accuracy", "epsilon") if key in summary}
        found[name] = kept | audit(path, shadows=shadows, canaries=canaries).numbers
        print(name, json.dumps(found[name]), flush=True)
        out.write_text(json.dumps({each: found[each] for each in CASES if each in found}, indent=1) + "\n")


def table(found: dict[str, Any]) -> Iterator[str]:
    """The audits in Markdown, one column each; intervals of 95 % in brackets."""
    names = [name for name in CASES if name in found]
    yield f"| | {' | '.join(names)} |"
    yield f"|{'---|' * (1 + len(names))}"

    def row(title: str, *keys: str) -> str:
        return f"| {title} | {' | '.join(_cell(found[name], keys) for name in names)} |"

    yield row("accuracy of the run", "final_accuracy")
    yield row("nearest neighbors, p", "findings", "Nearest neighbors", "p")
    for kind in ("loss of", "likelihood ratio,"):
        for model in MODELS:
            title = f"membership, {kind.removesuffix(',').removesuffix(' of')}, {model}, AUC"
            yield row(title, "findings", "Membership", f"{kind} {model}", "auc")
    yield row(
        "found at 1 % false alarms, loss, the average",
        *("findings", "Membership", "loss of the average", "tpr_at_1_percent"),
    )
    yield row("classes of clients, AUC", "findings", "Classes of clients", "auc")
    yield row("the same, p", "findings", "Classes of clients", "p")
    yield row("classes of those who took part, from D_syn, p", "findings", "Classes of clients", "d_syn_p")
    yield row("gradient inversion of the averaged update, p", "findings", "Gradient inversion", "p")
    yield row("inputs read off the averaged update, p", "findings", "Gradient inversion", "p_read_off")
    for model in ("the final model", "a network trained on D_syn alone"):
        yield row(f"canaries, {model}, AUC", "findings", "Canaries", model)
    yield row("canaries, distance to D_syn, p", "findings", "Canaries", "p_of_distance")


def _cell(value: Any, keys: tuple[str, ...]) -> str:
    for key in keys:
        value = value.get(key) if value else None
    if isinstance(value, list):
        return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"
    return "–" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    if sys.argv[1] == "table":
        print(*table(json.loads(Path(sys.argv[2]).read_text())), sep="\n")
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))

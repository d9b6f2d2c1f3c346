"""How the model, the mean and D_syn grow with the network's width.

    DYNAFED_DATA=... python experiments/widths.py cpu-fmnist-convnet ITERATIONS 16 32 64

writes experiments/results/widths-<preset>.json, a row for each width; rows that are there are not run again. FedAvg
runs for 40 rounds at the preset's protocol, seed 0, on validation data; D_syn is made from rounds 1 to 20, with the
quotient distance and rates per tensor. At rounds 36 to 40 (mean over the five): the model, the mean of the last 20, and
the model after fine-tuning on D_syn, as the preset says, and for 20 steps at 1e-4. Beside them, the matching loss of
the last 50 iterations, and the share of the squared way that no prediction sees. With 0 iterations, there is no D_syn.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from served_mean import LENGTH, TENSOR, Study

from dynafed import tree
from dynafed.synthesis.invariances import find_invariances

END = 40


def measure(study: Study, iterations: int) -> dict[str, Any]:
    """One width's row."""
    row: dict[str, Any] = study.both(END, None)
    network, shape = study.federation.problem.model, study.federation.schema.shape
    invariances = find_invariances(network, shape)
    ways = [tree.map_tensors(torch.sub, study.models[n + 5], study.models[n]) for n in range(LENGTH - 5)]
    row["invariant_share"] = statistics.fmean(sum(invariances.shares(way).values()) for way in ways)
    if iterations:
        began = time.perf_counter()
        synthetic, row["matching_loss"] = study.synthesize(study.models[:LENGTH], TENSOR | {"iterations": iterations})
        row["iterations"] = iterations
        row["inner_rates"] = [float(f"{rate:.3g}") for rate in synthetic.inner_rates]
        row["seconds"] = round(time.perf_counter() - began)
        row["fine-tuned"] = study.by_budget(END, synthetic)
    return row


def main(preset: str, iterations: str, *widths: str) -> None:
    """Run what is missing."""
    file = Path(__file__).parent / "results" / f"widths-{preset}.json"
    rows = json.loads(file.read_text()) if file.exists() else {}
    torch.set_num_threads(1)
    for width in widths:
        key = f"width {width}" + ("" if int(iterations) else ", no D_syn")
        if key in rows:
            continue
        study = Study(preset, 0, f"width-{width}", **{"convnet.width": int(width), "rounds": END})
        rows[key] = measure(study, int(iterations))
        file.write_text(json.dumps(rows, indent=1) + "\n")
        print(key, json.dumps(rows[key]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

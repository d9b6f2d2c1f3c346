"""CPU time of a checkpoint as more and more of 2,000 clients have a state: SCAFFOLD, 20 clients a round.

python experiments/checkpoint_cost.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import dynafed
from dynafed.engine import checkpoint

CLIENTS, ROUNDS, PART = 2000, 300, 60


def main() -> None:
    """Print the median CPU time of a checkpoint for each part of the run."""
    spent: list[float] = []
    save = checkpoint.save

    def timed(*args: Any) -> Path:
        began = time.process_time()
        folder = save(*args)
        spent.append(time.process_time() - began)
        return folder

    checkpoint.save = timed
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2 * CLIENTS, 6)).astype("float32"), rng.integers(0, 4, 2 * CLIENTS)
    values = {"method": "scaffold", "partition": "iid", "clients": CLIENTS, "participation": 0.01, "rounds": ROUNDS}
    values |= {"batch_size": 4, "mlp.width": 8, "workers": 1, "checkpoint_every": 1, "eval_every": ROUNDS}
    config = dynafed.Config.load(None, values)
    with tempfile.TemporaryDirectory() as folder:
        dynafed.run(config, train=(x, y), test=(x[:100], y[:100]), out=Path(folder) / "run", progress=False)
    for first in range(0, ROUNDS, PART):
        median = statistics.median(spent[first : first + PART])
        print(f"rounds {first + 1} to {first + PART}: {1000 * median:.1f} ms")


if __name__ == "__main__":
    main()

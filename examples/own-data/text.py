"""Text with an embedding: FedAvg against its running mean. DynaFed can't: words have no gradient.

python examples/own-data/text.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import dynafed

WORDS, LENGTH = 60, 12
TOPICS = ["sports", "politics", "science"]


class Bag(nn.Module):
    """The mean of the words' vectors, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, len(TOPICS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of word ids (N, LENGTH)."""
        logits: torch.Tensor = self.head(self.embedding(x).mean(1))
        return logits


def messages(count: int, topics: list[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Word ids and topics; a topic's own words are a third of its messages."""
    rng = np.random.default_rng(seed)
    y = rng.choice(topics, count)
    x = rng.integers(0, WORDS, (count, LENGTH))
    own = rng.random((count, LENGTH)) < 0.35
    x[own] = (y[:, None] * 10 + rng.integers(0, 10, (count, LENGTH)))[own]
    return x, np.array(TOPICS)[y]


def main(folder: Path = Path(), rounds: int = 20) -> dict[str, float]:
    """Phones whose owners write about one topic each; returns the accuracy of both methods."""
    phones = {f"phone-{number}": messages(40, [number % 3], number) for number in range(12)}
    common = {"rounds": rounds, "participation": 0.5, "lr": 0.01}
    found = {}
    for method in ("fedavg", "fedavg+average"):
        config = dynafed.Config.load(None, common | {"method": method})
        test = messages(300, [0, 1, 2], 99)
        result = dynafed.run(config, model=Bag, clients=phones, test=test, out=folder / method)
        found[method] = result.final_accuracy
        print(f"{method}: accuracy {result.final_accuracy:.1%}, first message: {result.predict(test[0][:1])[0]}")
    try:
        config = dynafed.Config.load(None, common | {"method": "dynafed"})
        dynafed.run(config, model=Bag, clients=phones, test=test, out=folder / "dynafed")
    except dynafed.UserError as error:
        print(error)
    return found


if __name__ == "__main__":
    main()

"""Randomness by key, not by sequence: every draw is named by (seed, purpose, round, client, ...).

So a result depends neither on the order of the work nor on how many processes share it, nor on a resume, and no
generator's state ever needs saving.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Seeds:
    """All the random streams of one run."""

    seed: int

    def key(self, purpose: str, *where: int | str) -> int:
        """128 bits that are as good as unique to this seed, purpose and place."""
        name = "/".join(map(str, (self.seed, purpose, *where)))
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")

    def rng(self, purpose: str, *where: int | str) -> np.random.Generator:
        """A fresh generator for one purpose in one place."""
        return np.random.Generator(np.random.Philox(key=self.key(purpose, *where)))

    @contextmanager
    def torch_seeded(self, purpose: str, *where: int | str) -> Iterator[None]:
        """Run code that can only draw from torch's global generator (layer initialization, nn.Dropout) under a key.

        The global generator is put back afterwards, so nobody outside notices.
        """
        with torch.random.fork_rng():
            seed = self.key(purpose, *where) % 2**63
            if torch.accelerator.is_available():
                torch.manual_seed(seed)
            else:
                torch.default_generator.manual_seed(seed)  # the same, without noting for absent devices who called
            yield

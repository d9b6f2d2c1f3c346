"""Who takes part in a round, who fails to, and who is slow."""

from __future__ import annotations

from dataclasses import dataclass

from dynafed.engine.plan import Plan


@dataclass(frozen=True)
class Cohort:
    """The clients sampled in one attempt at a round."""

    working: list[tuple[int, float]]
    """Each client that will send an update, with the share of its steps that it does; in ascending order."""
    dropped: list[int]


def sample(plan: Plan, round: int, attempt: int = 0) -> Cohort:
    """Draw a round's clients without replacement; the cost doesn't depend on how many there are in all."""
    config = plan.config
    chosen = plan.seeds.rng("sample", round, attempt).choice(
        len(plan.partition), config.sampled, replace=False, shuffle=False
    )
    working, dropped = [], []
    for client in sorted(int(client) for client in chosen):
        fate = plan.seeds.rng("fate", round, attempt, client).random(3)
        slow = fate[1] < config.stragglers
        if fate[0] < config.dropout or (slow and config.straggler_policy == "drop") or not len(plan.partition[client]):
            dropped.append(client)
        else:
            working.append((client, float(fate[2]) if slow else 1.0))
    return Cohort(working, dropped)

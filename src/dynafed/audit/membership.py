"""Can somebody who holds a model tell whether a sample was in the training?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dynafed.audit.finding import Finding
from dynafed.audit.neighbors import histogram
from dynafed.audit.statistics import Array, Estimate, auc, true_positive_rate, with_interval
from dynafed.audit.subject import Subject, repartitioned, shadow_models, with_data
from dynafed.tree import Tree

SAMPLES = 1000
"""Members and non-members each, at most."""
SMALLEST_DEVIATION = 1e-3


def check_membership(subject: Subject, shadows: int) -> Finding:
    """The loss threshold on every model, and the likelihood ratio with shadow runs."""
    rng = subject.seeds.rng("audit", "membership")
    inside = subject.members(SAMPLES, "members")
    total = len(subject.split.dataset.test_y)
    outside = np.sort(rng.choice(total, min(len(inside), total), replace=False))
    models = subject.models()
    scores = {
        f"loss of {name}": tuple(
            -subject.losses(model, *samples) for samples in (subject.training(inside), subject.held_out(outside))
        )
        for name, model in models.items()
    }
    if shadows:
        ratios = _likelihood_ratios(subject, models, inside, outside, shadows)
        scores |= {f"likelihood ratio, {name}": pair for name, pair in ratios.items()}
    rows, numbers, leaks, best = [], {}, False, ("", 0.5)
    for name, (members, others) in scores.items():
        area: Estimate = with_interval(auc, members, others, rng)
        rate = with_interval(true_positive_rate, members, others, rng)
        rows.append(
            [name, area.value, f"{area.low:.3f} to {area.high:.3f}", rate.value, f"{rate.low:.3f} to {rate.high:.3f}"]
        )
        numbers[name] = {"auc": area.plain(), "tpr_at_1_percent": rate.plain()}
        leaks |= area.low > 0.5
        best = max(best, (name, area.value), key=lambda pair: pair[1])
    found = (
        f"The best attack, by the {best[0]}, is right in {100 * best[1]:.1f} % of pairs of a member and a non-member; "
        f"guessing is right in 50 %."
        if best[0]
        else "No attack is better than guessing."
    )
    table = {"columns": ["attack", "AUC", "95 %", "found at 1 % false alarms", "95 % "], "rows": rows}
    members, others = next(iter(scores.values()))
    blocks: list[dict[str, Any]] = [
        {"kind": "table", "data": table},
        histogram("Score of members and others: loss of the average", {"members": members, "others": others}),
    ]
    return Finding(
        "Membership",
        f"{len(inside)} samples that clients trained on and {len(outside)} that nobody did: can an attacker tell them "
        "apart by their loss under a model that it holds"
        + (
            f", or by a likelihood ratio calibrated on {shadows} runs with other halves of the data?"
            if shadows
            else "?"
        ),
        found,
        "Stronger attacks exist, above all with more shadow runs, and single samples may be at a higher risk.",
        leaks,
        numbers,
        blocks,
    )


def _likelihood_ratios(
    subject: Subject, models: dict[str, Tree], inside: np.ndarray, outside: np.ndarray, shadows: int
) -> dict[str, tuple[Array, Array]]:
    """Carlini et al., S&P 2022: Gaussians of the scaled confidence, of shadow models with and without the sample.

    Each shadow run has a random half of the samples in question, and all others. Variances are common to all samples,
    because the runs are few. Models that a shadow run lacks, for want of a synthesis, are left out.
    """
    split = subject.split
    test_x, test_y = split.dataset.test_x[outside], split.dataset.test_y[outside]
    x, y = torch.cat([split.dataset.train_x, test_x]), torch.cat([split.dataset.train_y, test_y])
    pool = np.concatenate([inside, len(split.dataset.train_y) + np.arange(len(outside))])
    others = np.setdiff1d(split.partition.indices, inside)
    schema, device = split.dataset.schema, subject.federation.problem.device
    samples = schema.to_input((x[torch.from_numpy(pool)], y[torch.from_numpy(pool)]), device)
    chosen, confidences = [], []
    for number in range(shadows):
        rng = subject.seeds.rng("audit", "shadow", number // 2)
        half = rng.random(len(pool)) < 0.5
        half = half if number % 2 == 0 else ~half  # in pairs, so that every sample is in half of the runs
        seed = subject.federation.config.seed + 1000 + number
        rows = np.sort(np.concatenate([others, pool[half]]))
        federation = with_data(subject, repartitioned(subject, x, y, rows, seed), seed)
        held = shadow_models(federation, f"shadow run {number + 1} of {shadows}")
        chosen.append(half)
        confidences.append({name: _confidence(subject.losses(model, *samples)) for name, model in held.items()})
    found = {}
    for name in (name for name in models if all(name in scores for scores in confidences)):
        target = _confidence(subject.losses(models[name], *samples))
        ratio = log_likelihood_ratio(target, np.array([scores[name] for scores in confidences]), np.array(chosen))
        found[name] = ratio[: len(inside)], ratio[len(inside) :]
    return found


def log_likelihood_ratio(target: Array, scores: Array, seen: np.ndarray) -> Array:
    """Of each sample's score, if it was seen against not, by the scores of shadow runs that saw it or didn't."""
    log_odds = []
    for mask in (seen, ~seen):
        counts = np.maximum(1, mask.sum(0))
        mean = np.where(mask, scores, 0).sum(0) / counts
        spread = np.where(mask, scores - mean, 0)
        freedom = max(1, int(mask.sum() - (mask.sum(0) > 0).sum()))
        deviation = max(SMALLEST_DEVIATION, float(np.sqrt((spread**2).sum() / freedom)))
        log_odds.append(-0.5 * ((target - mean) / deviation) ** 2 - np.log(deviation))
    ratio: Array = log_odds[0] - log_odds[1]
    return ratio


def _confidence(losses: np.ndarray) -> Array:
    """The log odds of the right class."""
    right = np.clip(np.exp(-losses), 1e-9, 1 - 1e-9)
    odds: Array = np.log(right) - np.log1p(-right)
    return odds

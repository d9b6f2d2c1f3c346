"""Which client has which class? The server knows who took part, and sees only global models."""

from __future__ import annotations

import numpy as np

from dynafed.audit.finding import Finding
from dynafed.audit.statistics import Array, auc, p_value
from dynafed.audit.subject import Subject, replay, with_data
from dynafed.callbacks import Record
from dynafed.engine.checkpoint import RunState
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.tree import Tree

ROUNDS = 20
"""Rounds that are looked at, at most: about as many as DynaFed records."""
PRESENT = 0.05
"""A client has a class if so large a share of its samples is of it."""
RIDGE = 1e-2
RESAMPLES = 500


def check_ownership(subject: Subject) -> Finding:
    """Regress the movement of the last layer's biases on who took part."""
    tested = (
        "In each of the first rounds the server knows who took part and how the last layer's biases moved. A "
        "regression of the one on the other says which client pulls towards which class. It sees global models only, "
        "as with secure aggregation; a server that sees single updates can read classes off directly. Of D_syn, the "
        "shares of the classes are compared with those of the clients that it was made from."
    )
    not_proved = "More rounds, or the other layers, may tell more."
    name = _bias(subject)
    if name is None:
        return Finding("Classes of clients", tested, "The network has no bias for each class.", not_proved, None)
    counts = np.array([subject.split.class_counts(client) for client in range(subject.split.num_clients())], float)
    rounds = min(ROUNDS, subject.federation.config.rounds)
    models: list[Tree] = [subject.federation.problem.initial_model()]
    taking_part: list[list[int]] = []

    def note(state: RunState, record: Record) -> None:
        models.append(state.model)
        taking_part.append(record["clients"])

    replay(with_data(subject, subject.split), rounds, "replaying the first rounds", note)
    moves = np.diff(np.array([model[name].double().numpy() for model in models]), axis=0)
    regression = _regression(taking_part, len(counts))
    present = counts / np.maximum(1, counts.sum(1, keepdims=True)) >= PRESENT
    seen = np.array([any(client in clients for clients in taking_part) for client in range(len(counts))])
    regression, present = regression[seen], present[seen]
    scores = _guess(moves, regression)
    if not present.any() or present.all():
        return Finding("Classes of clients", tested, "Every client has every class.", not_proved, None)
    rng = subject.seeds.rng("audit", "ownership")
    value = auc(scores[present], scores[~present])
    drawn = []
    for _ in range(RESAMPLES):
        rows = rng.integers(len(scores), size=len(scores))
        if present[rows].any() and not present[rows].all():
            drawn.append(auc(scores[rows][present[rows]], scores[rows][~present[rows]]))
    low, high = (float(edge) for edge in np.quantile(drawn, [0.025, 0.975]))
    # Rounds are what is independent here: by chance, any round's movement might belong to any other's clients.
    shuffled = [_guess(rng.permutation(moves), regression) for _ in range(RESAMPLES)]
    p = p_value(value, [auc(each[present], each[~present]) for each in shuffled])
    found = (
        f"Of a class that a client has and one that it lacks, the regression tells which is which in "
        f"{100 * value:.0f} % of the cases [{100 * low:.0f}, {100 * high:.0f}], over {rounds} rounds; guessing is "
        f"right in 50 %. With the rounds shuffled it would be as good with p = {p:.3f}."
    )
    numbers: dict[str, object] = {"auc": [value, low, high], "p": p, "rounds": rounds}
    leaks = p < 0.05
    if subject.synthetic is not None:
        recorded = subject.federation.config.section("dynafed", DynaFedSettings).trajectory
        classes = np.sum([counts[clients].sum(0) for clients in taking_part[:recorded]], axis=0)
        mass = subject.synthetic.labels.mean(0).double().numpy()
        correlation = _correlation(mass, classes)
        of_chance = p_value(correlation, [_correlation(rng.permutation(mass), classes) for _ in range(RESAMPLES)])
        found += (
            f" D_syn names no client. How often it shows each class has a correlation of {correlation:.2f} with the "
            f"classes of those who took part in the rounds that it follows, p = {of_chance:.3f}."
        )
        numbers |= {"d_syn_correlation": correlation, "d_syn_p": of_chance}
        leaks |= of_chance < 0.05
    table = {
        "columns": ["client", "its classes", "guessed first"],
        "rows": [
            [
                int(client),
                ", ".join(map(str, np.flatnonzero(has))),
                ", ".join(map(str, np.argsort(-score)[: max(1, has.sum())])),
            ]
            for client, has, score in zip(np.flatnonzero(seen)[:30], present, scores, strict=False)
        ],
    }
    blocks = [{"kind": "table", "data": table}]
    return Finding("Classes of clients", tested, found, not_proved, leaks, numbers, blocks)


def _bias(subject: Subject) -> str | None:
    """The bias of the layer that gives the logits."""
    problem = subject.federation.problem
    shapes = {name: tuple(problem.model.get_parameter(name).shape) for name in problem.trainable}
    return next((name for name in reversed(list(shapes)) if shapes[name] == (problem.classes,)), None)


def _regression(taking_part: list[list[int]], clients: int) -> Array:
    """The matrix that takes the rounds' movements to what each client's presence adds."""
    presence = np.zeros((len(taking_part), clients))
    for row, present in zip(presence, taking_part, strict=True):
        row[present] = 1 / max(1, len(present))
    gram = presence.T @ presence + RIDGE * np.eye(clients)
    return np.asarray(np.linalg.solve(gram, presence.T), np.float64)


def _guess(moves: Array, regression: Array) -> Array:
    """For each client and class, how much the client's presence moves the class's bias."""
    scores: Array = regression @ (moves - moves.mean(0))
    return scores


def _correlation(one: Array, other: Array) -> float:
    return float(np.corrcoef(one, other)[0, 1]) if one.std() and other.std() else 0.0

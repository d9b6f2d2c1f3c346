"""Theorem 1 of the paper, checked where it applies: a strongly convex problem, eta_t = c / (t + gamma).

    python experiments/theory.py            writes experiments/results/theory.json and docs/theory.png

L2-regularized multinomial logistic regression on the digits that come with scikit-learn, split over clients with
Dirichlet(0.1). The optimum is found to machine precision, so the gap L(w_t) - L(w*) is exact. Local SGD and fine-tuning
steps share the clock t and the rate, as in the theorem's statement. Three servers are compared: none (FedAvg),
fine-tuning on D_syn, and on all the data ("ideal": delta = epsilon = 0).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynafed import data
from dynafed.seeds import Seeds
from dynafed.synthesis import synthesize

CLIENTS, LOCAL, TUNE, BATCH = 20, 5, 5, 8
REGULARISER, ALPHA = 0.1, 0.1
ROUNDS, TRAJECTORY, SEEDS = 4000, 20, 3
GAMMA = 400
HERE = Path(__file__).parent


Server = Callable[[Tensor], Tensor]
"""The gradient that the server fine-tunes with."""


class Problem:
    """Logistic regression in double precision; the weights are one matrix, the last feature is constant."""

    def __init__(self) -> None:
        digits = data.load("digits")
        x = digits.normalize(digits.train_x).flatten(1).double()
        self.x = torch.cat((x / x.norm(dim=1).mean(), torch.ones(len(x), 1)), dim=1)
        self.y = nn.functional.one_hot(digits.train_y, 10).double()
        split = data.make_partition(
            "dirichlet-balanced", digits.train_y, CLIENTS, alpha=ALPHA, rng=Seeds(0).rng("split")
        )
        # All clients train at once, as one batch of matrices: they have the same number of samples, up to one.
        least = int(split.sizes.min())
        self.clients = torch.stack([torch.from_numpy(split[client][:least]) for client in range(CLIENTS)])
        kept = self.clients.flatten()
        self.clients = torch.arange(len(kept)).reshape(CLIENTS, least)
        self.x, self.y = self.x[kept], self.y[kept]
        self.mu = REGULARISER
        self.smooth = REGULARISER + 0.5 * float(torch.linalg.matrix_norm(self.x.T @ self.x / len(self.x), 2))
        self.optimum = self._solve()
        self.least = self.loss(self.optimum)

    def loss(self, w: Tensor) -> float:
        """The regularized loss on everybody's data."""
        fit = -(self.y * torch.log_softmax(self.x @ w.T, dim=1)).sum(1).mean()
        return float(fit + REGULARISER / 2 * w.square().sum())

    def gradient(self, w: Tensor, x: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        """The regularized loss's gradient on these samples, or on everybody's."""
        x, y = (self.x, self.y) if x is None or y is None else (x, y)
        return (torch.softmax(x @ w.mT, dim=-1) - y).mT @ x / x.shape[-2] + REGULARISER * w

    def rate(self, t: int) -> float:
        """eta_t = c / (t + gamma); gamma is large enough that the first rounds are a way and not a leap."""
        return 2 / self.mu / (t + GAMMA)

    def _solve(self) -> Tensor:
        w = torch.zeros(10, self.x.shape[1], dtype=torch.float64, requires_grad=True)
        solver = torch.optim.LBFGS(
            [w], max_iter=2000, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            solver.zero_grad()
            fit = -(self.y * torch.log_softmax(self.x @ w.T, dim=1)).sum(1).mean()
            whole = fit + REGULARISER / 2 * w.square().sum()
            whole.backward()  # type: ignore[no-untyped-call]
            return whole

        solver.step(closure)
        return w.detach()


def train(
    problem: Problem, server: Server | None, seed: int, rounds: int
) -> tuple[list[int], list[float], list[Tensor]]:
    """Steps, gaps and models after each round; `server` gives the gradient that the server tunes with, if it does."""
    rng = Seeds(seed).rng("train")
    every = torch.arange(CLIENTS)[:, None]
    w, t, steps, gaps, path = torch.zeros_like(problem.optimum), 0, [], [], []
    for _ in range(rounds):
        local = w.expand(CLIENTS, -1, -1)
        for step in range(LOCAL):
            batch = problem.clients[
                every, torch.from_numpy(rng.integers(0, problem.clients.shape[1], (CLIENTS, BATCH)))
            ]
            local = local - problem.rate(t + step) * problem.gradient(local, problem.x[batch], problem.y[batch])
        w, t = local.mean(0), t + LOCAL
        if server is not None:
            for step in range(TUNE):
                w = w - problem.rate(t + step) * server(w)
            t += TUNE
        steps.append(t)
        gaps.append(problem.loss(w) - problem.least)
        path.append(w)
    return steps, gaps, path


def synthetic_gradient(problem: Problem) -> Server:
    """The gradient on D_syn, which is made from the first rounds of FedAvg.

    The inner rate is fixed so that the inner steps take as much time as the segment did. Then a gradient on D_syn has
    the size of the gradient that it stands for, as the theorem's assumption wants. It stands for the regularized loss.
    """
    _, _, path = train(problem, None, 0, TRAJECTORY)
    model = nn.Linear(problem.x.shape[1], 10, bias=False)
    losses: list[float] = []
    segment, inner_steps = 5, 20
    rate = sum(problem.rate(t) for t in range(LOCAL * segment)) / inner_steps
    made = synthesize(
        model,
        [{"weight": w.float()} for w in path],
        (problem.x.shape[1],),
        10,
        {
            "samples": 150,
            "iterations": 1500,
            "segment": segment,
            "inner_steps": inner_steps,
            "inner_lr": rate,
            "inner_lr_rate": 0.0,
            "image_lr": 0.02,
        },
        on_iteration=lambda iteration, loss, x: losses.append(loss),
    )
    print(f"matching loss {np.mean(losses[1:11]):.3f} -> {np.mean(losses[-50:]):.3f}, inner rate {made.inner_lr:.3g}")
    x, y = made.x.double(), made.labels.double()
    return lambda w: (torch.softmax(x @ w.T, dim=1) - y).T @ x / len(x)


def closeness(problem: Problem, server: Server, path: list[Tensor]) -> dict[str, float]:
    """The smallest delta and epsilon with |g_syn - g| <= delta |g| + epsilon on a path of models."""
    pairs = [(problem.gradient(w), server(w)) for w in path]
    size = torch.stack([g.norm() for g, _ in pairs])
    apart = torch.stack([(g - s).norm() for g, s in pairs])
    options = [(delta, float((apart - delta * size).max().clamp(min=0))) for delta in np.linspace(0, 2, 401)]
    delta, epsilon = min(options, key=lambda option: option[0] * float(size.mean()) + option[1])
    cosine = torch.stack([(g * s).sum() / (g.norm() * s.norm()) for g, s in pairs])
    return {
        "delta": float(delta),
        "epsilon": epsilon,
        "mean_cosine": float(cosine.mean()),
        "first_gradient": float(size[0]),
        "last_gradient": float(size[-1]),
    }


def main() -> None:
    """Run all, write the numbers and the picture."""
    torch.manual_seed(0)
    problem = Problem()
    synthetic = synthetic_gradient(problem)
    servers: dict[str, Server | None] = {"FedAvg": None, "DynaFed": synthetic, "ideal server data": problem.gradient}
    found: dict[str, Any] = {
        "mu": problem.mu,
        "smoothness": problem.smooth,
        "gradient_at_optimum": float(problem.gradient(problem.optimum).norm()),
        "curves": {},
    }
    for name, server in servers.items():
        runs = [train(problem, server, seed, ROUNDS) for seed in range(SEEDS)]
        steps, gaps = runs[0][0], np.mean([run[1] for run in runs], axis=0)
        late = slice(ROUNDS // 20, None)
        slope = float(np.polyfit(np.log(steps[late]), np.log(gaps[late]), 1)[0])
        bound = float(max(t * gap for t, gap in zip(steps, gaps, strict=True)))
        shown = np.unique(np.geomspace(1, ROUNDS, 60).astype(int)) - 1
        found["curves"][name] = {
            "steps": [steps[i] for i in shown],
            "gap": [float(gaps[i]) for i in shown],
            "slope_of_log_gap": slope,
            "C": bound,
            "last_gap": float(gaps[-1]),
        }
        print(f"{name:18} gap {gaps[-1]:.2e} after {steps[-1]} steps, slope {slope:+.2f}, C = max t*gap = {bound:.1f}")
        if name == "DynaFed":
            found["closeness"] = closeness(problem, synthetic, runs[0][2][:: max(1, ROUNDS // 400)])
            found["closeness_in_trajectory"] = closeness(problem, synthetic, runs[0][2][:TRAJECTORY])
    print(found["closeness"], found["closeness_in_trajectory"])
    found["condition_delta_L_below_mu"] = found["closeness"]["delta"] * problem.smooth < problem.mu
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "theory.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(found, HERE.parent / "docs" / "theory.png")


def plot(found: dict[str, Any], file: Path) -> None:
    """The gaps against C/T."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, curve in found["curves"].items():
        (line,) = axes.loglog(curve["steps"], curve["gap"], label=f"{name} (slope {curve['slope_of_log_gap']:+.2f})")
        if name != "DynaFed":
            bound = [curve["C"] / t for t in curve["steps"]]
            axes.loglog(
                curve["steps"], bound, "--", color=line.get_color(), alpha=0.5, label=f"C/T, C = {curve['C']:.1f}"
            )
    axes.set(
        xlabel="steps T (local and fine-tuning)", ylabel="L(w_T) - L(w*)", title="The gap on a strongly convex problem"
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()

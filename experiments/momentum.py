"""Inner steps with momentum: does D_syn teach more?

    DYNAFED_DATA=... python experiments/momentum.py cpu-fmnist-mlp 300 0,1,2 0,0.9

writes experiments/results/momentum-<preset>.json, a row for each momentum and seed of the synthesis; rows that are
there are not run again. FedAvg runs for 40 rounds at the preset's protocol, seed 0, on validation data; D_syn is made
from rounds 1 to 20, with the quotient distance and rates per tensor. The models of rounds 21, 23, ... 39 are then
fine-tuned once on it: with Adam, as in the preset, and by 20 and 80 inner steps with the learned rates, without
momentum.

With v_(i+1) = mu v_i + g(th_i) and th_(i+1) = th_i - R v_(i+1), the adjoint has a part for v, too. It is checked
against unrolled autograd in double precision before anything else is done.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from served_mean import LENGTH, TENSOR, Study
from torch import Tensor, nn
from torch.func import functional_call

from dynafed.engine.evaluation import evaluate
from dynafed.synthesis import SyntheticData, finetune, matching
from dynafed.synthesis.matching import InnerProblem, inner_problem, rates_by_name, soft_cross_entropy
from dynafed.tree import Tree

ROUNDS = range(21, 41, 2)


def unroll_and_adjoint(
    inner: InnerProblem,
    start: Tree,
    x: Tensor,
    lr: Tensor,
    steps: int,
    loss_of: Callable[[Tree], Tensor],
    augment: None,
    momentum: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What stands in for `matching.unroll_and_adjoint`; a rate for each tensor, no augmentation."""
    rates, history = rates_by_name(lr, start), []
    params, velocity = start, {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for _ in range(steps):
        grads = inner.gradient(params, x)
        velocity = {name: momentum * velocity[name] + grads[name] for name in start}
        history.append((params, velocity))
        params = {name: params[name] - rates[name] * velocity[name] for name in start}
    reached = {name: tensor.requires_grad_() for name, tensor in params.items()}
    loss = loss_of(reached)
    lam = dict(zip(reached, torch.autograd.grad(loss, list(reached.values())), strict=True))
    along = {name: torch.zeros_like(tensor) for name, tensor in lam.items()}
    dx, dlabels, dlr = torch.zeros_like(x), torch.zeros_like(inner.labels), x.new_zeros(len(start))
    for params, velocity in reversed(history):
        dlr -= torch.stack([(velocity[name] * lam[name]).sum() for name in lam])
        along = {name: along[name] - rates[name] * lam[name] for name in lam}
        hessian, by_x, by_labels = inner.hessian_vector_product(params, x, along)
        dx, dlabels = dx + by_x, dlabels + by_labels
        lam = {name: lam[name] + hessian[name] for name in lam}
        along = {name: momentum * tensor for name, tensor in along.items()}
    return loss.detach(), dx, dlabels, dlr


def check_adjoint(momentum: float, steps: int = 5) -> None:
    """Compare it with unrolled autograd."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    start = {name: tensor.detach() for name, tensor in network.named_parameters()}
    x, labels = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64).softmax(1)
    rates = torch.tensor([0.3, 0.2, 0.1, 0.4], dtype=torch.float64)

    def loss_of(reached: Tree) -> Tensor:
        return sum(((reached[name] - start[name] - 0.1) ** 2).sum() for name in start)  # type: ignore[return-value]

    with inner_problem(network, labels, 1 / len(x)) as inner:
        ours = unroll_and_adjoint(inner, start, x, rates, steps, loss_of, None, momentum)
    leaves = [each.clone().requires_grad_() for each in (x, labels, rates)]
    params: Tree = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    velocity: Tree = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for _ in range(steps):
        loss = soft_cross_entropy(functional_call(network, params, (leaves[0],)), leaves[1]) / len(x)
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()), create_graph=True), strict=True))
        velocity = {name: momentum * velocity[name] + grads[name] for name in params}
        params = {name: params[name] - leaves[2][i] * velocity[name] for i, name in enumerate(params)}
    for one, other in zip(ours[1:], torch.autograd.grad(loss_of(params), leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def measure(study: Study, iterations: int, seed: int) -> dict[str, Any]:
    """One row."""
    problem, changes = study.federation.problem, TENSOR | {"iterations": iterations}
    synthetic, loss = study.synthesize(study.models[:LENGTH], changes, seed)
    settings = replace(study.settings, **changes)

    def accuracy(tuned: Callable[[int], Tree]) -> float:
        return round(statistics.fmean(evaluate(study.federation, tuned(n))["accuracy"] for n in ROUNDS), 4)

    def with_adam(n: int) -> Tree:
        return finetune(problem.model, study.models[n - 1], synthetic, settings, problem.seeds, n)

    return {
        "matching_loss": round(loss, 3),
        "adam": accuracy(with_adam),
        **{f"{k} inner steps": accuracy(lambda n, k=k: inner_steps(study, n, synthetic, k)) for k in (20, 80)},  # type: ignore[misc]
    }


def inner_steps(study: Study, n: int, synthetic: SyntheticData, steps: int) -> Tree:
    """The model of a round after so many steps with the learned rates."""
    network, labels = study.federation.problem.model, synthetic.logits.softmax(1)
    params = {name: study.models[n - 1][name] for name, _ in network.named_parameters()}
    assert synthetic.inner_rates is not None
    rates = rates_by_name(synthetic.inner_rates, params)
    with inner_problem(network, labels, 1 / len(labels)) as inner:
        for _ in range(steps):
            params, _ = inner.step(params, synthetic.x, rates)
    return params


def main(preset: str, iterations: str, seeds: str, momenta: str) -> None:
    """Run what is missing."""
    file = Path(__file__).parent / "results" / f"momentum-{preset}.json"
    rows = json.loads(file.read_text()) if file.exists() else {}
    torch.set_num_threads(1)
    study = Study(preset, 0, "momentum", rounds=40)
    for momentum in map(float, momenta.split(",")):
        check_adjoint(momentum)
        matching.unroll_and_adjoint = partial(unroll_and_adjoint, momentum=momentum)
        for seed in map(int, seeds.split(",")):
            key = f"momentum {momentum:g}; seed {seed}"
            if key not in rows:
                rows[key] = measure(study, int(iterations), seed)
                print(key, json.dumps(rows[key]), flush=True)
                file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

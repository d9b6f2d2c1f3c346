"""Gradient inversion: what can be drawn from an averaged update, as a yardstick for D_syn.

Geiping et al., Inverting Gradients: How easy is it to break privacy in federated learning?, NeurIPS 2020.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafed import tree
from dynafed.audit.finding import Finding
from dynafed.audit.neighbors import nearness, to_png
from dynafed.audit.subject import Subject
from dynafed.stages import stage
from dynafed.tree import Tree

ITERATIONS = 300
RATE = 0.1


def check_inversion(subject: Subject) -> Finding:
    """Invert a single sample's gradient, to see that the attack works, and then the averaged update."""
    problem, rng = subject.federation.problem, subject.seeds.rng("audit", "inversion")
    problem.network.eval()
    members = subject.training(subject.members(len(subject.split.partition.indices), "inversion"))
    others = subject.held_out()
    weights = tree.to(subject.state.model, problem.device)
    one_x, one_y = members[0][:1], members[1][:1]
    single = invert(subject, weights, _gradient(subject, weights, one_x, one_y), one_y, rng)
    usual = float(torch.cdist(others[0][others[1] == one_y].flatten(1)[:300], one_x.flatten(1)).min())
    missed = float((single - one_x).norm()) / max(usual, 1e-9)
    update = {name: subject.state.model[name] - subject.average[name] for name in problem.trainable}
    labels = torch.arange(problem.classes)
    drawn = invert(subject, weights, tree.to(update, problem.device), labels, rng)
    result = nearness(drawn, labels, members, others, rng)
    leaks = result is not None and result.p < 0.05
    found = (
        f"From one sample's gradient, the attack draws a picture at {missed:.2f} of the distance from that sample to "
        "the nearest held-out one of its class. "
    )
    numbers: dict[str, object] = {"single_sample_distance": missed}
    if result is not None:
        found += (
            "From a round's averaged update, what it draws is "
            f"{'nearer to training samples than to' if leaks else 'no nearer to training samples than to'} held-out "
            f"ones (p = {result.p:.3f})."
        )
        numbers |= {"p": result.p, "difference": result.difference.plain()}
    blocks = []
    if drawn.ndim == 4:
        pictures = [
            {"src": to_png(one_x[0]), "caption": "a sample"},
            {"src": to_png(single[0]), "caption": "drawn from its gradient"},
        ]
        pictures += [{"src": to_png(image), "caption": f"class {label}"} for label, image in enumerate(drawn[:10])]
        text = "A sample and what its gradient gives; then, for each class, what a round's averaged update gives."
        blocks.append({"text": text, "kind": "images", "data": {"images": pictures, "pixelated": True, "small": True}})
    return Finding(
        "Gradient inversion",
        "The yardstick: an attacker who has the averaged update of a round looks for samples whose gradient points the "
        "same way, one for each class. The same attack on a single sample's gradient shows what it can do.",
        found,
        "The attack is a plain one. Who sees single clients' updates after few local steps draws much more from them.",
        leaks,
        numbers,
        blocks,
    )


def invert(subject: Subject, weights: Tree, target: Tree, labels: Tensor, rng: np.random.Generator) -> Tensor:
    """Samples with these labels whose gradient has the direction of `target`."""
    problem = subject.federation.problem
    start = rng.standard_normal((len(labels), *problem.shape)).astype(np.float32)
    x = torch.from_numpy(start).to(problem.device).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=RATE)
    for number in range(ITERATIONS):
        stage("gradient inversion", number, ITERATIONS)
        optimizer.zero_grad()
        grads = _gradient(subject, weights, x, labels, create_graph=True)
        dot = torch.stack([(grads[name] * target[name]).sum() for name in target]).sum()
        norms = [torch.stack([each[name].square().sum() for name in target]).sum().sqrt() for each in (grads, target)]
        loss = 1 - dot / (norms[0] * norms[1] + 1e-12)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return x.detach()


def _gradient(subject: Subject, weights: Tree, x: Tensor, y: Tensor, create_graph: bool = False) -> Tree:
    problem = subject.federation.problem
    leaves = {name: weights[name].detach().requires_grad_() for name in problem.trainable}
    logits = torch.func.functional_call(problem.model, weights | leaves, (x,))
    grads = torch.autograd.grad(F.cross_entropy(logits, y), list(leaves.values()), create_graph=create_graph)
    return dict(zip(leaves, grads, strict=True))

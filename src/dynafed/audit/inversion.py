"""Gradient inversion: what can be drawn from an averaged update, as a yardstick for D_syn.

Geiping et al., Inverting Gradients: How easy is it to break privacy in federated learning?, NeurIPS 2020. Where the
first layer is linear, inputs can be read off its gradient: Phong et al., Privacy-Preserving Deep Learning via
Additively Homomorphic Encryption, 2018.
"""

from __future__ import annotations

import math

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
SMALLEST = 1e-30


def check_inversion(subject: Subject) -> Finding:
    """Invert a single sample's gradient, to see that the attack works, and then the averaged update."""
    problem, rng = subject.federation.problem, subject.seeds.rng("audit", "inversion")
    problem.network.eval()
    members = subject.training(subject.members(len(subject.split.partition.indices), "inversion"))
    others = subject.held_out()
    weights = tree.to(subject.state.model, problem.device)
    one_x, one_y = members[0][:1], members[1][:1]
    gradient = _gradient(subject, weights, one_x, one_y)
    single = invert(subject, weights, gradient, one_y, rng)
    exact = read_off(gradient, problem.shape)
    if exact is not None:
        single = exact[:1]
    usual = float(torch.cdist(others[0][others[1] == one_y].flatten(1)[:300], one_x.flatten(1)).min())
    missed = float((single - one_x).norm()) / max(usual, 1e-9)
    update = {name: subject.state.model[name] - subject.average[name] for name in problem.trainable}
    labels = torch.arange(problem.classes)
    update = tree.to(update, problem.device)
    drawn = invert(subject, weights, update, labels, rng)
    result = nearness(drawn, labels, members, others, rng)
    read = read_off(update, problem.shape)
    guessed = None if read is None else problem.predict(weights, read).argmax(1)
    also = None if read is None or guessed is None else nearness(read, guessed, members, others, rng)
    leaks = any(found is not None and found.p < 0.05 for found in (result, also))
    found = (
        f"From one sample's gradient, the attack {'draws' if exact is None else 'reads off'} a picture at {missed:.2f} "
        "of the distance from that sample to the nearest held-out one of its class. "
    )
    numbers: dict[str, object] = {"single_sample_distance": missed}
    if result is not None:
        found += (
            f"From a round's averaged update, what it draws is {_nearer(result.p)} training samples than to held-out "
            f"ones (p = {result.p:.3f})."
        )
        numbers |= {"p": result.p, "difference": result.difference.plain()}
    if also is not None:
        found += (
            f" What the first layer's {len(also.to_members)} units show of that update is {_nearer(also.p)} training "
            f"samples than to held-out ones (p = {also.p:.3f})."
        )
        numbers |= {"p_read_off": also.p, "difference_read_off": also.difference.plain()}
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
        "same way, one for each class; a linear first layer's gradient by that of its biases shows, for each unit, a "
        "mean of inputs. The same attack on a single sample's gradient shows what it can do.",
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
        squares = [torch.stack([each[name].square().sum() for name in target]).sum() for each in (grads, target)]
        # Where the network is all too sure, the gradient is 0, and that of its norm isn't a number.
        loss = 1 - dot / ((squares[0] + SMALLEST).sqrt() * squares[1].sqrt() + 1e-12)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return x.detach()


def read_off(gradient: Tree, shape: tuple[int, ...]) -> Tensor | None:
    """What each unit of a linear first layer shows of its inputs, the most active unit first; None without one.

    A unit's gradient is its error times the input, that of its bias the error alone: their quotient is the input of a
    single sample, and a weighted mean of several.
    """
    first = next(iter(gradient))
    weight, bias = gradient[first], gradient.get(f"{first.removesuffix('weight')}bias")
    if bias is None or weight.shape != (len(bias), math.prod(shape)):
        return None
    order = [unit for unit in bias.abs().argsort(descending=True).tolist() if bias[unit] != 0]
    return (weight[order] / bias[order, None]).view(-1, *shape) if order else None


def _nearer(p: float) -> str:
    return "nearer to" if p < 0.05 else "no nearer to"


def _gradient(subject: Subject, weights: Tree, x: Tensor, y: Tensor, create_graph: bool = False) -> Tree:
    problem = subject.federation.problem
    leaves = {name: weights[name].detach().requires_grad_() for name in problem.trainable}
    logits = torch.func.functional_call(problem.model, weights | leaves, (x,))
    grads = torch.autograd.grad(F.cross_entropy(logits, y), list(leaves.values()), create_graph=create_graph)
    return dict(zip(leaves, grads, strict=True))

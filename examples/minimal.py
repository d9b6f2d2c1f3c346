"""FedAvg and DynaFed (Pi et al., CVPR 2023) on one page of plain PyTorch: `python examples/minimal.py`.

`synthesize` is the paper's Algorithm 1 and `federate` its Algorithm 2; comments give the paper's symbols. The package
computes the same, faster and in less memory: `tests/test_minimal.py` shows that both give the same weights.
"""

import lzma
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

BUILTIN = Path(__file__).parents[1] / "src/dynafed/data/builtin/fmnist-mini.npz"


@dataclass
class Settings:
    """Everything that can be chosen, named as in the engine's config."""

    rounds: int = 60  # C
    clients_per_round: int = 8
    local_epochs: int = 1
    batch_size: int = 32
    lr: float = 1e-3
    # DynaFed
    trajectory: int = 15  # L: rounds that are recorded
    segment: int = 5  # s: rounds from the start of a segment to its end
    samples: int = 100  # in D_syn
    iterations: int = 200  # N
    inner_steps: int = 10  # s'
    inner_lr: float = 0.1  # of the inner steps at first; it is learned, too
    inner_lr_rate: float = 0.01
    image_lr: float = 0.01  # eta, of the samples
    label_lr: float = 0.05  # eta, of the labels
    finetune_lr: float = 3e-4
    finetune_steps: int = 50


def seeded(seed):
    """Return a function that gives each random choice its own generator, such as rng("batches", round, client)."""
    return lambda purpose, *where: np.random.default_rng([seed, *purpose.encode(), *where])


def dirichlet_split(y, clients, alpha, rng):
    """Return each client's rows: equally many, in class proportions drawn from Dirichlet(alpha)."""
    order, classes, size = rng.permutation(len(y)), int(y.max()) + 1, len(y) // clients
    pools = [order[y[order] == label] for label in range(classes)]
    split = []
    for _ in range(clients):
        mixture = rng.dirichlet(np.full(classes, alpha)) + 1e-6  # any class will do once the wanted ones are gone
        rows = np.empty(0, int)
        while len(rows) < size:
            left = np.array([len(pool) for pool in pools])
            share = mixture * (left > 0)
            counts = np.minimum(rng.multinomial(size - len(rows), share / share.sum()), left)
            rows = np.concatenate([rows, *(pool[:count] for pool, count in zip(pools, counts, strict=True))])
            pools = [pool[count:] for pool, count in zip(pools, counts, strict=True)]
        split.append(rows)
    return split


def train(net, weights, x, y, *, lr, batch_size, epochs, rng):
    """Return the weights after `epochs` of Adam; the labels are class numbers or distributions over the classes."""
    params = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    optimizer = torch.optim.Adam(params.values(), lr)
    for _ in range(epochs):
        for rows in torch.from_numpy(rng.permutation(len(x))).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(functional_call(net, params, (x[rows],)), y[rows]).backward()
            optimizer.step()
    return {name: tensor.detach() for name, tensor in params.items()}


def synthesize(net, trajectory, shape, classes, settings, rng):
    """Algorithm 1: return samples and labels on which training goes the way that the trajectory went."""
    noise = rng("synthetic").standard_normal((settings.samples, *shape), dtype=np.float32)
    x = torch.from_numpy(noise).requires_grad_()  # X
    logits = torch.zeros(settings.samples, classes, requires_grad=True)  # of y: at first every label is equally likely
    log_lr = torch.tensor(math.log(settings.inner_lr), requires_grad=True)
    rates = (x, settings.image_lr), (logits, settings.label_lr), (log_lr, settings.inner_lr_rate)
    optimizer = torch.optim.Adam([{"params": [tensor], "lr": rate} for tensor, rate in rates])
    for n in range(1, settings.iterations + 1):
        t = rng("segment", n).integers(len(trajectory) - settings.segment)  # t ~ U
        start, target = trajectory[t], trajectory[t + settings.segment]
        params = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
        for _ in range(settings.inner_steps):  # A(X, y, w^t, s'), kept as a graph, so that it can be differentiated
            loss = F.cross_entropy(functional_call(net, params, (x,)), logits.softmax(dim=1))
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            params = {name: params[name] - log_lr.exp() * grad for name, grad in zip(params, grads, strict=True)}
        squared = [sum((w[name] - target[name]).square().sum() for name in target) for w in (params, start)]
        distance = squared[0] / squared[1]  # d: 1 if the inner steps lead nowhere, 0 if they reach the target
        optimizer.zero_grad()
        distance.backward()
        optimizer.step()
    return x.detach(), logits.detach().softmax(dim=1)


def federate(net, clients, settings, rng, dynafed=True):
    """Algorithm 2, or FedAvg: yield the global weights after each round. `clients` is a list of (samples, labels)."""
    weights = {name: tensor.detach().clone() for name, tensor in net.named_parameters()}
    trajectory, synthetic = [], None
    for c in range(1, settings.rounds + 1):
        active = rng("sample", c).choice(len(clients), settings.clients_per_round, replace=False, shuffle=False)
        chosen = {"lr": settings.lr, "batch_size": settings.batch_size, "epochs": settings.local_epochs}
        local = [train(net, weights, *clients[m], **chosen, rng=rng("batches", c, m)) for m in sorted(active)]
        weights = {name: torch.stack([own[name] for own in local]).mean(dim=0) for name in weights}
        if dynafed and c <= settings.trajectory:
            trajectory.append(weights)
        if dynafed and c == settings.trajectory:
            shape, classes = clients[0][0].shape[1:], 1 + max(int(y.max()) for _, y in clients)
            synthetic = synthesize(net, trajectory, shape, classes, settings, rng)  # D_syn
        elif synthetic:
            chosen = {"lr": settings.finetune_lr, "batch_size": settings.samples, "epochs": settings.finetune_steps}
            weights = train(net, weights, *synthetic, **chosen, rng=rng("finetune", c))
        yield weights


def load(path, split):
    """Return one split of the built-in images (N, 1, 28, 28), normalized, and its labels."""
    with np.load(path) as file:
        pixels = np.frombuffer(lzma.decompress(file[f"{split}_xz"].tobytes()), np.uint8).reshape(-1, 1, 28, 28)
        return (torch.tensor(pixels) / 255 - 0.3057) / 0.3762, torch.tensor(file[f"{split}_labels"]).long()


def main(path=BUILTIN, seed=0):
    """Print the accuracy of FedAvg and of DynaFed on twenty clients, most of which have one or two classes."""
    (x, y), (test_x, test_y), rng = load(path, "train"), load(path, "test"), seeded(int(seed))
    clients = [(x[rows], y[rows]) for rows in dirichlet_split(y.numpy(), 20, 0.01, rng("split"))]
    torch.set_num_threads(1)  # matrices this small are slower with more
    torch.manual_seed(int(seed))
    hidden = (nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    net = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, 10))

    def accuracy(weights):
        return (functional_call(net, weights, (test_x,)).argmax(dim=1) == test_y).float().mean().item()

    for method in ("FedAvg", "DynaFed"):
        history = [accuracy(weights) for weights in federate(net, clients, Settings(), rng, method == "DynaFed")]
        print(f"{method:8}{np.mean(history[-5:]):6.1%}  mean test accuracy of the last five rounds")


if __name__ == "__main__":
    main(*sys.argv[1:])

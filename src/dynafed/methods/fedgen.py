"""FedGen: the server learns to generate features of each class, and clients practice on them.

Zhu, Hong and Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dynafed import optim
from dynafed.generator import all_heads, cumulative, draw_inputs, fresh, generate, generator_loss
from dynafed.kernels import FusedLoss, generator_fits, practice_loss, train_generator
from dynafed.methods.base import ClientContext, ClientOutput, Method, Needs, ServerContext, ServerOutput
from dynafed.problem import Problem
from dynafed.settings import setting
from dynafed.tree import Tree, column_major, nest, only, to, unnest


@dataclass(frozen=True)
class FedGenSettings:
    """Section `fedgen`; the defaults are those of the authors' MNIST runs."""

    alpha: float = setting(10.0, "weight of the head's loss on generated features", low=0)
    beta: float = setting(10.0, "weight of the agreement between real samples and generated features", low=0)
    decay: float = setting(0.98, "of alpha and beta in every round", above=0, high=1)
    noise: int = setting(32, "random numbers that the generator starts from", low=1)
    hidden: int = setting(256, "units of the generator's hidden layer", low=1)
    steps: int = setting(50, "training steps of the generator in a round", low=0)
    lr: float = setting(3e-4, "of the generator's Adam", above=0)
    weight_decay: float = setting(1e-2, "of the generator's Adam", low=0)
    batch_size: int = setting(128, "generated features in a step on the server", low=2)
    client_batch: int = setting(32, "generated features in a step on a client", low=1)
    diversity: float = setting(1.0, "weight of the term that keeps generated features apart", low=0)


class FedGen(Method):
    """The generator maps noise and a label to a feature that the clients' heads, each trusted by how many samples of
    that label it has seen, give this label.

    Clients add alpha * CE(head(generated), label) and beta * KL(head(feature generated for y), model(x)), from round 2
    on: in round 1 nothing has been learned yet.
    """

    name = "fedgen"
    summary = "a generator of features, trained on the server against the clients' heads, helps local training"
    citation = "Zhu, Hong and Zhou, ICML 2021"
    needs = Needs(client_models=True, features=True, classes=True)
    Settings = FedGenSettings
    settings: FedGenSettings
    zero_means_fedavg = ("alpha", "beta")

    def prepare(self, client: ClientContext) -> Tree:
        """How labels are distributed, and how much both terms still count; nothing in round 1."""
        rounds = int(client.extras["seen/rounds"])
        if not rounds:
            return {}
        fading = torch.tensor(self.settings.decay**rounds, dtype=torch.float32, device=client.x.device)
        return {"labels": torch.from_numpy(cumulative(client.extras["seen/labels"])), "fading": fading}

    def sample_step(self, batch_size: int, client: ClientContext) -> Tree:
        """Labels, noise for them and for the batch, and how much both terms still count; nothing in round 1."""
        chosen, known = self.settings, client.prepared
        if not known:
            return {}
        shares, device = known["labels"].numpy(), client.x.device
        labels, noise = draw_inputs(shares, chosen.client_batch, chosen.noise, client.rng, device, more=batch_size)
        return {"labels": labels, "noise": noise, "fading": known["fading"]}

    def loss(self, params: Tree, x: Tensor, y: Tensor, client: ClientContext) -> Tensor:
        """Cross-entropy and both terms."""
        if not client.sampled:
            return super().loss(params, x, y, client)
        chosen, drawn = self.settings, client.sampled
        labels = torch.cat([y, drawn["labels"]])
        # In one batch, so that its statistics never come from a single sample.
        generated = client.head(params, generate(unnest(client.extras)["net"], drawn["noise"], labels))
        agreed, logits = generated[: len(y)].softmax(1).detach(), client.forward(params, x)
        taught = F.cross_entropy(generated[len(y) :], drawn["labels"])
        agreement = F.kl_div(logits.log_softmax(1), agreed, reduction="batchmean")
        return F.cross_entropy(logits, y) + drawn["fading"] * (chosen.alpha * taught + chosen.beta * agreement)

    def fused_loss(self, client: ClientContext) -> FusedLoss | None:
        """The same."""
        chosen, rounds = self.settings, int(client.extras["seen/rounds"])
        if not rounds:
            return None
        net, fading = unnest(client.extras)["net"], chosen.decay**rounds
        return practice_loss(net, fading * chosen.alpha, fading * chosen.beta, chosen.client_batch, chosen.noise)

    def finish(self, params: Tree, client: ClientContext) -> ClientOutput:
        """Say how many samples of each label there are."""
        return ClientOutput(extras={"counts": torch.bincount(client.y, minlength=len(client.extras["seen/labels"]))})

    def extras_spec(self, problem: Problem) -> Tree:
        """One whole number for each class."""
        return {"counts": torch.zeros(problem.classes, dtype=torch.int64)}

    def init_server(self, problem: Problem, model: Tree) -> Tree:
        """A fresh generator."""
        chosen, classes = self.settings, problem.classes
        with problem.seeds.torch_seeded(self.name):
            net = fresh(chosen.noise, classes, chosen.hidden, width=model["head.weight"].shape[1])
        return nest({"net": net, "seen": {"rounds": torch.tensor(0), "labels": torch.full((classes,), 1 / classes)}})

    def broadcast(self, state: Tree) -> Tree:
        """The generator, how long it was trained, and how often each label occurs."""
        return {name: tensor for name, tensor in state.items() if not name.startswith("adam/")}

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        """Train the generator; the model stays as it is."""
        chosen, problem, parts = self.settings, server.problem, unnest(state)
        counts = torch.stack([update.extras[self.name]["counts"] for update in server.updates]).clamp(min=0).double()
        labels = (counts.sum(0) / counts.sum()).float() if counts.any() else parts["seen"]["labels"]
        seen = {"rounds": parts["seen"]["rounds"] + 1, "labels": labels}
        trust = (counts / counts.sum(0).clamp(min=1)).to(problem.device, torch.float32)
        names = [name for name in model if name.startswith("head.")]
        heads = [to(only(update.model, names), problem.device) for update in server.updates]
        # With both terms off, clients had a kernel before the generator had one: such a run must go on as it began.
        fused = problem.fused and not self.uses_fedavg_steps() and generator_fits(parts["net"])
        # By name, for Adam knows parameters by their place, and a checkpoint doesn't keep the order.
        net = {name: parts["net"][name].to(problem.device, copy=True) for name in sorted(parts["net"])}
        net = column_major(net, [name for name in net if net[name].ndim == 2]) if fused else net
        adam = optim.Optimizer("adam", list(net.values()), chosen.lr, weight_decay=chosen.weight_decay)
        adam.load_state(to(parts.get("adam", {}), problem.device))
        rng, shares = problem.seeds.rng(self.name, server.round), cumulative(seen["labels"])
        drawn = (draw_inputs(shares, chosen.batch_size, chosen.noise, rng, problem.device) for _ in range(chosen.steps))
        if fused and chosen.steps:
            stacked = torch.stack([head["head.weight"] for head in heads]), torch.stack([h["head.bias"] for h in heads])
            losses = train_generator(net, adam, stacked, trust, list(drawn), chosen.diversity).tolist()
        else:
            losses = list(self._trained(net, adam, all_heads(problem.head, heads), trust, drawn))
        trained = {"net": {name: tensor.detach() for name, tensor in net.items()}, "adam": adam.state()}
        metrics = {"generator_loss": sum(losses) / chosen.steps} if chosen.steps else {}
        return ServerOutput(model, to(nest(trained | {"seen": seen}), "cpu"), metrics)

    def _trained(
        self,
        net: Tree,
        adam: optim.Optimizer,
        heads: Callable[[Tensor], Tensor],
        trust: Tensor,
        drawn: Iterable[tuple[Tensor, Tensor]],
    ) -> Iterator[float]:
        """Takes a step for each of these labels and noise; the losses before each."""
        for tensor in net.values():
            tensor.requires_grad_()
        for labels, noise in drawn:
            loss = generator_loss(net, heads, trust, noise, labels, self.settings.diversity)
            adam.step(torch.autograd.grad(loss, list(net.values())))
            yield loss.item()

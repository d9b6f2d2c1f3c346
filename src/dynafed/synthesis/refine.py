"""Training on the synthetic set: fine-tuning the global model, or a network from scratch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from dynafed import optim, tree
from dynafed.seeds import Seeds
from dynafed.synthesis.dataset import Synthetic
from dynafed.synthesis.matching import inner_problem
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.synthesize import keyed_augment, loss_scale
from dynafed.tree import Tree


def finetune(
    module: nn.Module,
    weights: Tree,
    synthetic: Synthetic,
    config: DynaFedSettings,
    seeds: Seeds,
    round: int,
    threads: int = 0,
) -> Tree:
    """The global model after `finetune_steps` steps on the synthetic samples, with a fresh optimiser."""
    return train_on(
        module,
        weights,
        synthetic,
        config.finetune_optimizer,
        config.finetune_lr,
        config.finetune_steps,
        rng=seeds.rng("finetune", round),
        batch=config.finetune_batch,
        scale=loss_scale(config, synthetic.logits.shape[1]),
        change=keyed_augment(config, seeds, "finetune", round),
        chunk=config.chunk,
        threads=threads,
    )


def train_on(
    module: nn.Module,
    weights: Tree,
    synthetic: Synthetic,
    optimizer: str,
    lr: float,
    steps: int,
    *,
    rng: np.random.Generator,
    batch: int = 0,
    scale: float = 1.0,
    change: Callable[[Tensor, int], Tensor] | None = None,
    chunk: int = 0,
    threads: int = 0,
) -> Tree:
    """The weights after so many steps on the synthetic samples; buffers stay as they are.

    The arithmetic is done on the module's device; the result is where `weights` were. Threads share the samples as in
    the synthesis (0: one a core), and their number changes no bit.
    """
    if not steps:
        return weights
    module.eval()
    device = next(module.parameters()).device
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    moved = tree.to(tree.clone(weights), device)
    params = {name: moved[name] for name in weights if name in trained}
    x, labels = synthetic.x.to(device), synthetic.labels.to(device)
    stepper = optim.Optimizer(optimizer, list(params.values()), lr)
    with inner_problem(module, labels, scale, chunk, threads) as whole:
        for number, (samples, wanted) in enumerate(optim.batches((x, labels), batch or len(x), steps, rng)):
            seen = samples if change is None else change(samples, number)
            inner = replace(whole, labels=wanted, scale=scale / len(wanted), buffers=moved)
            stepper.step(list(inner.gradient(params, seen).values()))
    return {name: tensor.detach().to(weights[name].device) for name, tensor in moved.items()}

"""Training on synthetic data: fine-tuning of the global model, or of a network from scratch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import nn

from dynafed import optim, tree
from dynafed.seeds import Seeds
from dynafed.synthesis.matching import Augment, inner_problem
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.synthesize import keyed_augment, loss_scale
from dynafed.synthesis.synthetic import SyntheticData
from dynafed.tree import Tree


def finetune(
    module: nn.Module,
    weights: Tree,
    synthetic: SyntheticData,
    config: DynaFedSettings,
    seeds: Seeds,
    round_num: int,
    threads: int = 0,
) -> Tree:
    """The global model after `finetune_steps` steps on the synthetic samples, with a fresh optimizer."""
    return train_on(
        module,
        weights,
        synthetic,
        config.finetune_optimizer,
        config.finetune_lr,
        config.finetune_steps,
        rng=seeds.rng("finetune", round_num),
        batch=config.finetune_batch,
        scale=loss_scale(config, synthetic.logits.shape[1]),
        augment=keyed_augment(config, seeds, "finetune", round_num),
        chunk=config.chunk,
        threads=threads,
    )


def train_on(
    module: nn.Module,
    weights: Tree,
    synthetic: SyntheticData,
    optimizer: str,
    lr: float,
    steps: int,
    *,
    rng: np.random.Generator,
    batch: int = 0,
    scale: float = 1.0,
    augment: Augment | None = None,
    chunk: int = 0,
    threads: int = 0,
) -> Tree:
    """The weights after `steps` optimizer steps on the synthetic samples; buffers stay as they are.

    Runs on the module's device; the result is on the device of `weights`. `chunk` and `threads` are those of
    `matching_gradient`; the number of threads changes no bit.
    """
    if not steps:
        return weights
    module.eval()
    device = next(module.parameters()).device
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    state = tree.to(tree.clone_contiguous(weights), device)
    params = {name: state[name] for name in weights if name in trained}
    x, labels = synthetic.x.to(device), synthetic.labels.to(device)
    stepper = optim.Optimizer(optimizer, list(params.values()), lr)
    with inner_problem(module, labels, scale, chunk, threads) as problem:
        for step, (samples, targets) in enumerate(optim.batches((x, labels), batch or len(x), steps, rng)):
            batch_x = samples if augment is None else augment(samples, step)
            inner = replace(problem, labels=targets, scale=scale / len(targets), buffers=state)
            stepper.step(list(inner.gradient(params, batch_x).values()))
    return {name: tensor.detach().to(weights[name].device) for name, tensor in state.items()}

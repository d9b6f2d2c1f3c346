"""fedjax: FedAvg with its `for_each_client` on the jit backend, or on the pmap backend with a device a core."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from peers.protocol import SAMPLES_FOR_LOSS, Turns, Workload


def forward(workload: Workload) -> Any:
    """The workload's network in haiku; images are channels-last there."""
    import haiku as hk
    import jax

    def apply(batch: dict[str, Any]) -> Any:
        x = batch["x"]
        if workload.model == "mlp":
            return hk.nets.MLP([workload.width, workload.width, workload.classes])(x.reshape(len(x), -1))
        for _ in range(3):
            x = hk.Conv2D(workload.width, 3)(x)
            x = hk.InstanceNorm(create_scale=True, create_offset=True)(x)
            x = hk.avg_pool(jax.nn.relu(x), (2, 2), (2, 2), "VALID")
        return hk.Linear(workload.classes)(x.reshape(len(x), -1))

    return hk.transform(apply)


def main() -> None:
    turns = Turns()
    workload, options = turns.task.workload, turns.task.options
    if workload.model not in ("mlp", "convnet"):
        raise SystemExit(f"the network {workload.model} isn't written in haiku")
    if options["backend"] == "pmap":
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={os.cpu_count()}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    # Newer versions of jax have it under this name only.
    jax.tree_map = jax.tree_util.tree_map
    import fedjax

    fedjax.set_for_each_client_backend(options["backend"])
    x, y = turns.task.arrays()
    if len(workload.shape) == 3:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    clients = [
        (i, Counted({"x": x[workload.rows(i)], "y": y[workload.rows(i)].astype(np.int32)}))
        for i in range(workload.clients)
    ]
    sample = {"x": x[:1], "y": y[:1].astype(np.int32)}
    model = fedjax.create_model_from_haiku(
        forward(workload), sample, lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits)
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.adam(workload.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch, num_epochs=1),
    )
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    rng = np.random.default_rng(0)
    seen = {"x": jnp.asarray(x[:SAMPLES_FOR_LOSS]), "y": jnp.asarray(y[:SAMPLES_FOR_LOSS].astype(np.int32))}

    def loss() -> float:
        return float(model.train_loss(seen, model.apply_for_eval(state.params, seen)).mean())

    def one_round() -> int:
        nonlocal state
        chosen = rng.choice(workload.clients, workload.per_round, replace=False)
        keys = jax.random.split(jax.random.PRNGKey(int(rng.integers(2**31))), workload.per_round)
        state, _ = algorithm.apply(state, [(*clients[i], key) for i, key in zip(chosen, keys, strict=True)])
        jax.block_until_ready(state.params)
        return Counted.take()

    turns.loss = loss
    turns.ready(
        sum(leaf.size for leaf in jax.tree_util.tree_leaves(state.params)), "fedjax", "jax", "jaxlib", "dm-haiku"
    )
    turns.run(one_round)


class Counted:
    """A client's dataset that counts the batches taken from it; made when fedjax can be imported."""

    batches = 0

    def __new__(cls, examples: dict[str, np.ndarray]) -> Any:
        import fedjax

        class Dataset(fedjax.ClientDataset):
            def shuffle_repeat_batch(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
                for batch in super().shuffle_repeat_batch(*args, **kwargs):
                    cls.batches += 1
                    yield batch

        return Dataset(examples)

    @classmethod
    def take(cls) -> int:
        """The batches, each of which is one step, since it was last asked."""
        taken, cls.batches = cls.batches, 0
        return taken


if __name__ == "__main__":
    main()

"""pfl-research: its simulation of FedAvg, FedProx or SCAFFOLD, in one process or in two that share a round's clients.

Its in-memory dataset does not shuffle: batches are views of a client's samples in their order, which costs less than
what the other sides do.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import torch

from peers.protocol import PROX_MU, Task, Turns, Workload
from peers.torch_side import OPTIMIZERS, Steps, judge, network, parameters, tensors

FOREVER = 10**9


class Follower:
    """Stands in for the turns in the second process: the first one says when to go on."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def start(self) -> None:
        torch.distributed.barrier()

    def finished(self, steps: int) -> None:
        total = torch.tensor(steps)
        torch.distributed.all_reduce(total)
        torch.distributed.barrier()


class Leader(Turns):
    """The turns of the first process, which takes the second one with it."""

    together = False

    def start(self) -> None:
        super().start()
        self._go()

    def finished(self, steps: int) -> None:
        total = torch.tensor(steps)
        if self.together:
            torch.distributed.all_reduce(total)
        super().finished(int(total))
        self._go()

    def _go(self) -> None:
        if self.together:
            torch.distributed.barrier()

    def hire(self, processes: int) -> None:
        """Start the other processes, with the environment that torchrun would give them."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {
            "TORCHELASTIC_RUN_ID": "benchmark",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
        }
        command = [sys.executable, "-m", "peers.pfl.peer", "follow"]
        others = []
        for rank in range(1, processes):
            environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            others.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, text=True))
            pipe = others[-1].stdin
            assert pipe
            pipe.write(repr((self.task.workload.to_json(), str(self.task.data), self.task.options)) + "\n")
            pipe.flush()
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
        self.together = bool(others)

        def close() -> None:
            for other in others:
                other.send_signal(signal.SIGKILL)
                other.wait()
            os._exit(0)

        self.closing = close


def method(workload: Workload) -> tuple[Any, Any]:
    """The algorithm and its parameters."""
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.algorithm.fedprox import FedProx, FedProxParams
    from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
    from pfl.data.user_state import InMemoryUserStateStorage

    given = {
        "central_num_iterations": FOREVER,
        "evaluation_frequency": FOREVER,
        "train_cohort_size": workload.per_round,
        "val_cohort_size": 0,
    }
    if workload.method == "fedprox":
        return FedProx(), FedProxParams(mu=PROX_MU, **given)
    if workload.method == "scaffold":
        own = {"population": workload.clients, "use_gradient_as_control_variate": False}
        return SCAFFOLD(), SCAFFOLDParams(user_state_storage=InMemoryUserStateStorage(), **own, **given)
    return FederatedAveraging(), NNAlgorithmParams(**given)


def simulate(turns: Any) -> None:
    """The simulation proper, the same in every process."""
    workload: Workload = turns.task.workload
    torch.set_num_threads(turns.task.options["threads"])

    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    x, y = tensors(turns.task)
    steps = Steps()

    class Network(torch.nn.Module):
        """The network, and the loss that pfl asks of it."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network(workload)

        def loss(self, xs: torch.Tensor, ys: torch.Tensor, eval: bool = False) -> torch.Tensor:
            self.train(not eval)
            return torch.nn.functional.cross_entropy(self.network(xs), ys)

        def metrics(self, xs: torch.Tensor, ys: torch.Tensor, eval: bool = True) -> dict[str, Any]:
            return {}

    class Asked(TrainingProcessCallback):
        """Holds the run after every round until the next one is wanted."""

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            turns.finished(steps.take())
            return False, Metrics()

    users = {
        i: Dataset(raw_data=[x[workload.rows(i)], y[workload.rows(i)]], user_id=str(i)) for i in range(workload.clients)
    }
    # What SCAFFOLD's clients remember stays in their process, so they have to stay, too.
    silos = {"num_silos": turns.task.options.get("processes", 1)} if workload.method == "scaffold" else {}
    data = FederatedDataset(users.__getitem__, get_user_sampler("random", list(users), **silos))
    module = Network()
    steps.server = torch.optim.SGD(module.parameters(), 1.0)
    model = PyTorchModel(module, local_optimizer_create=OPTIMIZERS[workload.optimizer], central_optimizer=steps.server)
    algorithm, settings = method(workload)
    if isinstance(turns, Turns):
        judge(turns, lambda: module.network, x, y)
        turns.ready(parameters(module), "pfl", "torch")
    turns.start()
    algorithm.run(
        settings,
        SimulatedBackend(training_data=data, val_data=None),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=workload.lr, local_batch_size=workload.batch),
        callbacks=[Asked()],
        send_metrics_to_platform=False,
    )


def main() -> None:
    if sys.argv[1:] == ["follow"]:
        from ast import literal_eval
        from pathlib import Path

        workload, data, options = literal_eval(sys.stdin.readline())
        simulate(Follower(Task(Workload(**workload), Path(data), options)))
        return
    turns = Leader()
    turns.hire(turns.task.options.get("processes", 1))
    simulate(turns)


if __name__ == "__main__":
    main()

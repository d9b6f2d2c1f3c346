"""What a method is: up to two halves, each with defaults that are FedAvg's. A new method overrides what differs.

The client half is a loss and a gradient correction, both pure. The server half sees the model after averaging, and may
also replace the average itself. Whatever changes over time is a `Tree` that the engine keeps: a client's state, the
server's state. So a method is stateless, runs on every backend, and every checkpoint is complete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from dynafed.kernels import FusedLoss
from dynafed.messages import Update
from dynafed.problem import Problem
from dynafed.registry import Registry
from dynafed.tasks import CROSS_ENTROPY, Task
from dynafed.tree import Tree, map_tensors

if TYPE_CHECKING:
    from dynafed.config import Config


@dataclass(frozen=True)
class Needs:
    """What a method asks for beyond FedAvg; checked before round 1."""

    server_data: str = ""
    """"unlabeled" or "labeled" if the server must hold samples (`server_samples`)."""
    client_models: bool = False
    """Whether the server must see each client's model, not only the average."""
    client_memory: bool = False
    """Whether a client keeps a state between its rounds."""
    features: bool = False
    """Whether the network must be `head(features(x))`, a `models.Classifier`."""
    sample_gradients: bool = False
    """Whether the loss must have a gradient by the samples, which whole numbers have not."""
    classes: bool = False
    """Whether it must be one class of several that is learned, not labels or numbers (`loss`)."""

    def __str__(self) -> str:
        words = {
            f"{self.server_data} server data": self.server_data,
            "each client's model": self.client_models,
            "client memory": self.client_memory,
            "features": self.features,
        }
        return ", ".join(word for word, needed in words.items() if needed)


@dataclass(frozen=True)
class ClientView:
    """One client before round 1: the problem, and that client's own data. Nothing leads to another client's data."""

    client: int
    problem: Problem
    x: Tensor
    """The client's samples, normalized, on the problem's device."""
    y: Tensor


@dataclass(frozen=True)
class ClientContext:
    """What a client half can use during one round of local training."""

    client: int
    forward: Callable[[Tree, Tensor], Tensor]
    """Logits of the model with the given trainable parameters."""
    global_params: Tree
    """The trainable parameters of the global model, as received."""
    global_buffers: Tree
    """The rest of the global model, as received. A second model runs with `forward(other | global_buffers, x)`: without
    them, it would write its batch norms' statistics into the model that is being trained."""
    extras: Tree
    """What the method's own server half sent along."""
    state: Tree
    """What this client kept from its last round; empty at first."""
    x: Tensor
    y: Tensor
    """All of the client's samples, normalized, and their labels."""
    steps: int
    """Local steps of this round."""
    lr: float
    rng: np.random.Generator
    """The method's own random stream, for `prepare` and `sample_step`; the order of the batches has another."""
    features: Callable[[Tree, Tensor], Tensor]
    """The vectors that the head takes, with the given parameters; only if `Needs.features`."""
    head: Callable[[Tree, Tensor], Tensor]
    """Logits of such vectors."""
    prepared: Tree = field(default_factory=dict)
    """What `prepare` returned."""
    sampled: Tree = field(default_factory=dict)
    """What `sample_step` returned for this step."""
    task: Task = CROSS_ENTROPY
    """The loss: `task.mean_loss(outputs, y)`."""
    fused_gradient: Callable[[Tree], Tree] | None = None
    """The gradient of the mean loss of all samples, at given parameters, by a kernel; None where steps take none."""


@dataclass(frozen=True)
class AffineCorrection:
    """What is added to a gradient at the parameters w: scale * (w - reference) + shift. An empty tree is left out."""

    scale: float = 0.0
    reference: Tree = field(default_factory=dict)
    shift: Tree = field(default_factory=dict)

    def __call__(self, grads: Tree, params: Tree) -> Tree:
        """The corrected gradients."""
        if self.reference and (scale := self.scale):
            grads = map_tensors(lambda grad, w, start: grad + scale * (w - start), grads, params, self.reference)
        return map_tensors(torch.add, grads, self.shift) if self.shift else grads

    def __add__(self, other: AffineCorrection) -> AffineCorrection:
        """Both, one after the other."""
        scale = sum(each.scale for each in (self, other) if each.reference)
        shifts = [each.shift for each in (self, other) if each.shift]
        own, second = self.reference, other.reference
        if own and any(second[name] is not tensor for name, tensor in own.items() if second):
            # Around one reference: w - w_second = (w - w_own) + (w_own - w_second).
            shifts.append({name: other.scale * (own[name] - second[name]) for name in own})
        shift = map_tensors(lambda *each: functools.reduce(torch.add, each), *shifts) if shifts else {}
        return AffineCorrection(scale, own or second, shift)


@dataclass(frozen=True)
class ClientOutput:
    """What a client keeps for its next round, and what it sends beside its model."""

    state: Tree = field(default_factory=dict)
    extras: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class ServerRuntime:
    """What the machine that runs the server offers to long server work."""

    folder: Path | None = None
    """For a method's own files, such as work in progress; the run's folder, if there is one."""
    check_stop: Callable[[], None] = lambda: None
    """Raises if the run should stop. Called where stopping loses nothing."""
    progress: Callable[[str, int, int], None] = lambda what, done, total: None
    """Shows how far a piece of work is."""
    threads: int = 0
    """Threads that server work may use (0: one a core); their number changes no bit."""
    measure: Callable[..., Any] | None = None
    """Measures D_syn against real samples, which only a simulation has; None unless `dynafed.evidence` asks for it."""


@dataclass(frozen=True)
class ServerContext:
    """What a server half can use in one round. Nothing leads to a client's data."""

    problem: Problem
    round: int
    global_model: Tree
    """The global model that the clients started from."""
    data: tuple[Tensor, Tensor] | None = None
    """The samples (normalized, on the device) and labels that the server holds; None if it has none."""
    runtime: ServerRuntime = ServerRuntime()
    average: Tree = field(default_factory=dict)
    """The combined model before any server step; empty while updates are still being combined."""
    extras: Tree = field(default_factory=dict)
    """The uniform mean of what the clients' halves of this method sent, or a robust average's own."""
    participants: int = 0
    """Accepted updates in this round."""
    updates: Sequence[Update] = ()
    """Every accepted update, if the method needs client models; else empty."""
    sent: Mapping[str, Tree] = field(default_factory=dict)
    """What went down to the clients beside the model, by method."""
    combined: Mapping[str, float] = field(default_factory=dict)
    """What the combiner said beside the average; empty while updates are still being combined."""

    @property
    def samples(self) -> tuple[Tensor, Tensor]:
        """The server's samples and labels, for a method that needs them."""
        assert self.data is not None  # `Needs.server_data` was checked before round 1
        return self.data


@dataclass(frozen=True)
class ServerOutput:
    """A server half's result: the new model, its own new state (tensors), and numbers for metrics.jsonl."""

    model: Tree
    state: Tree
    metrics: Mapping[str, float] = field(default_factory=dict)
    served: Tree | None = None
    """A model that is evaluated and served instead of `model`; the clients still get `model`. None: `model` itself."""


@dataclass(frozen=True)
class Combined:
    """What a combiner returns: one model, and numbers for metrics.jsonl."""

    model: Tree
    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Tree] = field(default_factory=dict)
    """What clients sent beside the model, combined, by method; where it is missing, the uniform mean is taken."""


class Combiner(Protocol):
    """Turns a stream of updates into one model."""

    def add(self, update: Update) -> None:
        """Take one more update."""

    def result(self) -> Combined:
        """The combined model."""


class Method:
    """One paper's method. Subclasses set the class variables and override some of the functions below."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    citation: ClassVar[str] = ""
    needs: ClassVar[Needs] = Needs()
    Settings: ClassVar[type[Any] | None] = None
    """A frozen dataclass of `settings.setting` fields, read from the config's section `name`."""
    zero_means_fedavg: ClassVar[tuple[str, ...]] = ()
    """Settings that, all at 0, make local training that of FedAvg."""
    ignores_weighting: ClassVar[bool] = True
    """For methods with a `combiner`: whether it has weights of its own, so that `weighting` would have no effect."""

    counts_steps: ClassVar[bool] = False
    """For methods with a `combiner`: whether it goes by the number of steps that a client says it took."""

    def __init_subclass__(cls, register: bool = True) -> None:
        if register and vars(cls).get("name"):
            METHODS.add(cls.name, cls)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.settings: Any = config.section(self.name, self.Settings) if self.Settings else None

    def incompatibility(self, others: Sequence[Method]) -> str | None:
        """Why the method can't run with this config, or together with these others; None if it can."""
        return None

    def composed_with(self) -> list[type[Method]]:
        """The other methods of the config's composition."""
        kinds = [METHODS.load(name.strip()) for name in self.config.method.split("+")]
        return [kind for kind in kinds if kind is not type(self)]

    # The client half

    def setup_client(self, client: ClientView) -> Tree:
        """Returns what every client sends once, before round 1."""
        return {}

    def setup_spec(self, problem: Problem) -> Tree:
        """The layout of what `setup_client` returns, without its rows: a set-up that differs is left out."""
        return {}

    def prepare(self, client: ClientContext) -> Tree:
        """Returns what stays the same during local training, as `client.prepared`. Called before the first step."""
        return {}

    def sample_step(self, batch_size: int, client: ClientContext) -> Tree:
        """Returns what is random in one step, as `client.sampled`, so that `loss` is pure. Called before each step."""
        return {}

    def loss(self, params: Tree, x: Tensor, y: Tensor, client: ClientContext) -> Tensor:
        """The loss of one batch, a function of tensors only."""
        return client.task.mean_loss(client.forward(params, x), y)

    def affine_correction(self, client: ClientContext) -> AffineCorrection:
        """Returns what is added to every gradient, if it has this form. Called after `prepare`."""
        return AffineCorrection()

    def correct_gradients(self, grads: Tree, params: Tree, client: ClientContext) -> Tree:
        """Returns the gradients by which one step is taken. Corrections of several methods are applied in turn."""
        return self.affine_correction(client)(grads, params)

    def fused_loss(self, client: ClientContext) -> FusedLoss | None:
        """Returns `loss` as our kernels know it; None if it is the plain one. Called after `prepare`."""
        return None

    def finish(self, params: Tree, client: ClientContext) -> ClientOutput:
        """Returns what to keep and what to send. Called after the last step."""
        return ClientOutput()

    def extras_spec(self, problem: Problem) -> Tree:
        """The layout of `ClientOutput.extras`: an update with other names, shapes or dtypes is rejected."""
        return {}

    # The server half

    def init_server(self, problem: Problem, model: Tree) -> Tree:
        """The server's state before round 1."""
        return {}

    def setup_server(self, state: Tree, setups: Iterable[Tree], problem: Problem) -> Tree:
        """The server's state after what the clients sent with `setup_client`."""
        return state

    def broadcast(self, state: Tree) -> Tree:
        """Returns what every sampled client gets beside the model."""
        return {}

    def combiner(self, server: ServerContext) -> Combiner | None:
        """Returns what takes the average's place in this round."""
        return None

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        """Changes the combined model. Called once a round, in the order in which the methods are named."""
        return ServerOutput(model, state)

    # What the engine asks about a method

    def uses_fedavg_steps(self) -> bool:
        """Whether local training takes exactly the steps of FedAvg."""
        off = self.zero_means_fedavg and not any(getattr(self.settings, name) for name in self.zero_means_fedavg)
        return bool(off) or not (self.changes_loss() or self.corrects_gradients())

    @classmethod
    def declares_steps(cls) -> bool:
        """Whether what it does to steps is told by `affine_correction` and `fused_loss`, so that a kernel can do it.

        A subclass that overrides what these stand for must override them, too.
        """
        return cls._stands_for("affine_correction", "correct_gradients") and cls._stands_for(
            "fused_loss", "loss", "sample_step"
        )

    @classmethod
    def _stands_for(cls, declared: str, *functions: str) -> bool:
        """Whether a declaration is as new as the functions that it stands for, in the order of inheritance."""
        newest = next(kind for kind in cls.__mro__ if not {declared, *functions}.isdisjoint(vars(kind)))
        return declared in vars(newest)

    @classmethod
    def overrides(cls, *functions: str) -> bool:
        """Whether this class has its own version of any of these functions."""
        return any(getattr(cls, name) is not getattr(Method, name) for name in functions)

    @classmethod
    def has_client_half(cls) -> bool:
        """Whether it changes anything on the clients."""
        return cls.overrides("setup_client", "prepare", "finish") or cls.changes_loss() or cls.corrects_gradients()

    @classmethod
    def changes_loss(cls) -> bool:
        """Whether it has a loss of its own; only one method of a composition can."""
        return cls.overrides("sample_step", "loss")

    @classmethod
    def corrects_gradients(cls) -> bool:
        """Whether it corrects gradients; corrections of several methods chain."""
        return cls.overrides("correct_gradients", "affine_correction")


METHODS: Registry[type[Method]] = Registry("method", {})
"""Every method by name. A subclass of `Method` with a name is added when it is defined."""

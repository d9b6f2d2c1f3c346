"""What a method is: up to two halves, each with defaults that are FedAvg's. A new method overrides what differs.

The client half is a loss and a gradient correction, both pure. The server half sees the model after averaging, and may
also replace the average itself. Whatever changes over time is a `Tree` that the engine keeps: a client's memory, the
server's state. So a method is stateless, runs on every engine, and every checkpoint is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from dynafed.messages import Update
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.engine.plan import Plan


@dataclass(frozen=True)
class Needs:
    """What a method asks for beyond FedAvg; checked before round 1."""

    server_data: str = ""
    """"unlabelled" or "labelled" if the server must hold samples (`server_samples`)."""
    client_models: bool = False
    """Whether the server must see each client's model, not only the average."""
    client_memory: bool = False
    """Whether a client must remember something between its rounds."""
    features: bool = False
    """Whether the network must be `head(features(x))`, a `models.Classifier`."""

    def __str__(self) -> str:
        words = {
            f"{self.server_data} server data": self.server_data,
            "each client's model": self.client_models,
            "client memory": self.client_memory,
            "features": self.features,
        }
        return ", ".join(word for word, needed in words.items() if needed)


@dataclass(frozen=True)
class Local:
    """What a client can look at during one round of local training."""

    client: int
    forward: Callable[[Tree, Tensor], Tensor]
    """Logits of the model with the given trainable parameters."""
    start: Tree
    """The trainable parameters of the global model, as received."""
    buffers: Tree
    """The rest of the global model, as received. A second model runs with `forward(other | buffers, x)`: without them,
    it would write its batch norms' statistics into the model that is being trained."""
    extras: Tree
    """What the method's own server half sent along."""
    memory: Tree
    """What this client kept from its last round; empty at first."""
    x: Tensor
    y: Tensor
    """The client's whole data, normalised."""
    steps: int
    lr: float
    rng: np.random.Generator
    """The method's own random stream, for `begin` and `draw`; the order of the batches doesn't depend on it."""
    features: Callable[[Tree, Tensor], Tensor]
    """The vectors that the head sees, with the given parameters; only if `Needs.features`."""
    head: Callable[[Tree, Tensor], Tensor]
    """Logits of such vectors."""
    carry: Tree = field(default_factory=dict)
    """What `begin` returned."""
    drawn: Tree = field(default_factory=dict)
    """What `draw` returned for this step."""


@dataclass(frozen=True)
class Finished:
    """What a client keeps and what it sends up beside its model."""

    memory: Tree = field(default_factory=dict)
    extras: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """What the machine that runs the server offers to long server work."""

    folder: Path | None = None
    """For a method's own files, such as work in progress; the run's folder, if there is one."""
    check: Callable[[], None] = lambda: None
    """To be called where stopping loses nothing: it raises if somebody asked the run to stop."""
    busy: Callable[[str, int, int], None] = lambda what, done, total: None
    """Shows how far a piece of work is."""


@dataclass(frozen=True)
class Server:
    """What the server half can look at in one round."""

    plan: Plan
    round: int
    before: Tree
    """The global model that the clients started from."""
    combined: Tree
    """The average of the clients' models, whatever the steps before this one made of it."""
    extras: Tree
    """The uniform mean of what the clients' halves of this method sent."""
    participants: int
    updates: Sequence[Update] = ()
    """Every accepted update, if the method needs client models; else empty."""
    host: Host = Host()


@dataclass(frozen=True)
class Refined:
    """A server half's result: the new model, its own new state, and numbers for metrics.jsonl."""

    model: Tree
    state: Tree
    metrics: Mapping[str, float] = field(default_factory=dict)


class Combiner(Protocol):
    """Turns a stream of updates into one model."""

    def add(self, update: Update) -> None:
        """Take one more update."""

    def result(self) -> Tree:
        """The combined model."""


class Method:
    """One paper's method. Subclasses set the class variables and override some of the functions below."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    citation: ClassVar[str] = ""
    needs: ClassVar[Needs] = Needs()
    Settings: ClassVar[type[Any] | None] = None
    strengths: ClassVar[tuple[str, ...]] = ()
    """Settings that, all at 0, leave nothing of what the method does to local training."""

    registry: ClassVar[dict[str, type[Method]]] = {}

    def __init_subclass__(cls) -> None:
        if vars(cls).get("name"):
            Method.registry[cls.name] = cls

    def __init__(self, config: Config) -> None:
        self.config = config
        self.settings: Any = config.section(self.name, self.Settings) if self.Settings else None

    def refuses(self, others: Sequence[Method]) -> str | None:
        """Why it makes no sense with this config, or together with these other methods; None if it does."""
        return None

    # The client half

    def enrol(self, plan: Plan, client: int) -> Tree:
        """What every client sends once, before round 1. Costs nothing unless a method overrides it."""
        return {}

    def sends_once(self, plan: Plan) -> Tree:
        """The layout of what `enrol` gives, without its rows: an enrolment that looks different is left out."""
        return {}

    def begin(self, local: Local) -> Tree:
        """Prepare what stays the same during local training; it arrives in `local.carry`."""
        return {}

    def draw(self, size: int, local: Local) -> Tree:
        """What is random in one step on `size` samples; it arrives in `local.drawn`, so that `loss` stays pure."""
        return {}

    def loss(self, params: Tree, x: Tensor, y: Tensor, local: Local) -> Tensor:
        """The loss of one batch, a function of tensors only."""
        return F.cross_entropy(local.forward(params, x), y)

    def adjust(self, grads: Tree, params: Tree, local: Local) -> Tree:
        """Correct the gradients of one step."""
        return grads

    def finish(self, params: Tree, local: Local) -> Finished:
        """What to keep and what to send, after the last step."""
        return Finished()

    def sends(self, plan: Plan) -> Tree:
        """The layout of `Finished.extras`: an update with other names, shapes or dtypes is rejected."""
        return {}

    # The server half

    def initial(self, plan: Plan, model: Tree) -> Tree:
        """The server's state before round 1."""
        return {}

    def admit(self, state: Tree, plan: Plan, enrolments: Iterable[Tree]) -> Tree:
        """The server's state after what the clients sent with `enrol`."""
        return state

    def broadcast(self, state: Tree) -> Tree:
        """What every sampled client gets beside the model."""
        return {}

    def combiner(self, plan: Plan) -> Combiner | None:
        """Something in the average's place."""
        return None

    def refine(self, model: Tree, state: Tree, server: Server) -> Refined:
        """Change the combined model."""
        return Refined(model, state)

    def plain(self) -> bool:
        """Whether local training takes the very steps of FedAvg."""
        off = self.strengths and not any(getattr(self.settings, name) for name in self.strengths)
        return bool(off) or not self.overrides("draw", "loss", "adjust")

    @classmethod
    def overrides(cls, *functions: str) -> bool:
        """Whether this class has its own version of any of these functions."""
        return any(getattr(cls, name) is not getattr(Method, name) for name in functions)

    @classmethod
    def trains(cls) -> bool:
        """Whether it has a client half."""
        return cls.overrides("enrol", "begin", "draw", "loss", "adjust", "finish")

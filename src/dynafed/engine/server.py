"""The only server round: validate every update, combine the sound ones, then run each method's server step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dynafed import tree
from dynafed.config import Config
from dynafed.engine.federation import ServerSide
from dynafed.engine.guard import NormGuard
from dynafed.errors import UserError
from dynafed.messages import Broadcast, Update, validate_finite, validate_setup, validate_update
from dynafed.methods import Mean, ServerOutput, ServerRuntime
from dynafed.secure_aggregation import SecureSum
from dynafed.tree import Tree


@dataclass(frozen=True)
class RoundOutcome:
    """What the server has after a round's updates: what it had before, if too few of them were sound."""

    average: Tree
    """The combined model, before any server step."""
    model: Tree
    """The next global model; the same object as `average` if no method changed it."""
    server: Mapping[str, Tree]
    """Each method's server state, by name."""
    accepted: list[int]
    """Whose updates are in the model; nobody's, if there is no new one."""
    rejected: list[dict[str, Any]]
    bytes_up: int
    """All that was sent up, sound or not."""
    seconds_clients: float
    """The clients' own time, summed."""
    metrics: dict[str, Any] = field(default_factory=dict)
    curves: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """The losses of watched clients during local training."""
    served: Tree | None = None
    """What is evaluated and served in the model's place; None if it is the model itself."""
    norms: Tree = field(default_factory=dict)
    """What the next round's updates are judged by."""
    bytes_down: int = 0
    """What the clients got after the broadcast."""


def server_broadcast(side: ServerSide, round_num: int, model: Tree, server: Mapping[str, Tree]) -> Broadcast:
    """What the clients of a round get."""
    extras = {step.name: step.broadcast(server.get(step.name, {})) for step in side.methods.steps}
    return Broadcast(round_num, model, {name: extra for name, extra in extras.items() if extra})


def server_setup(
    side: ServerSide, server: Mapping[str, Tree], setups: Iterable[Tree]
) -> tuple[dict[str, Tree], dict[str, int]]:
    """What the clients send once, before round 1, becomes part of the server's state; and how many bytes it was.

    A set-up that differs from the method's spec, or holds NaN or infinity, is left out.
    """
    method = side.methods.sets_up
    assert method is not None
    spec = method.setup_spec(side.problem)
    counts = {"bytes_enrolment": 0, "enrolments_rejected": 0}

    def sound() -> Iterator[Tree]:
        for setup in setups:
            counts["bytes_enrolment"] += tree.nbytes(setup)
            if validate_setup(setup, spec):
                counts["enrolments_rejected"] += 1
            else:
                yield setup

    state = method.setup_server(dict(server.get(method.name, {})), sound(), side.problem)
    return {**server, method.name: state}, counts


def server_update(
    side: ServerSide,
    broadcast: Broadcast,
    server: Mapping[str, Tree],
    updates: Iterable[Update],
    runtime: ServerRuntime | None = None,
    norms: Tree | None = None,
) -> RoundOutcome:
    """One round's updates become the next global model.

    `updates` may be a stream: nothing but a running sum is held, unless a method needs each model. With fewer sound
    updates than `min_survivors`, or if the average or a server step returns something that isn't finite or is absurdly
    large, everything stays as it was; then the largest update is named. `norms` is the outcome's of the round before.
    """
    context = side.context(broadcast.round, broadcast.model, runtime or ServerRuntime())
    context = replace(context, sent=broadcast.extras)
    combiner = side.methods.combiner(context)
    config = side.config
    private = side.methods.private  # then updates are clipped, and what is rejected must not depend on other clients
    large = "accept" if private else config.large_updates
    # How many steps a client can have taken depends on its examples.
    weighting = "examples" if side.methods.counts_steps else config.weighting
    guard = NormGuard(broadcast.model, norms, large, config.max_update_norm, weighting)
    spec = side.methods.extras_spec(side.problem)
    extras: dict[str, Mean] = {}
    kept: list[Update] = []
    accepted: list[int] = []
    curves: dict[int, tuple[float, ...]] = {}
    rejected: list[dict[str, Any]] = []
    loss = examples = seconds = 0.0
    bytes_up = 0
    members: dict[int, tuple[int, ...]] = {}

    def blame(client: int, reason: str) -> list[dict[str, Any]]:
        return [{"client": each, "reason": reason} for each in members.get(client, (client,))]

    secure = SecureSum(config, side.problem.seeds, broadcast, spec) if config.secure_aggregation else None

    def arriving() -> Iterator[Update]:
        nonlocal bytes_up, seconds
        for sent in updates:
            bytes_up += sent.nbytes
            seconds += sent.seconds
            yield side.transforms.decode(sent, broadcast)

    for update in secure.mean(arriving()) if secure else arriving():
        summed = bool(update.members)
        held = side.client_size(update.client) if weighting == "examples" and not summed else None
        reason = validate_update(update, broadcast, spec) or _validate_examples(update, held)
        if not reason and side.methods.counts_steps:
            reason = _validate_steps(update, config)
        if not reason:
            update, reason = guard.judge(update, examples_known=summed or held is not None)
        members.update({update.client: update.members} if summed else {})
        if reason:
            rejected += blame(update.client, reason)
            continue
        combiner.add(update)
        for name, extra in update.extras.items():
            extras.setdefault(name, Mean("uniform")).add_tree(dict(extra))
        if side.methods.keeps_updates:
            kept.append(update)
        accepted += update.members or [update.client]
        if update.curve:
            curves[update.client] = update.curve
        loss += update.loss * update.examples
        examples += update.examples

    def unchanged(because: str = "", client: int | None = None) -> RoundOutcome:
        blamed = blame(guard.largest if client is None else client, because) if because else []
        model = broadcast.model
        return RoundOutcome(
            model, model, server, [], rejected + blamed, bytes_up, seconds, norms=known, bytes_down=bytes_down
        )

    bytes_down = 0
    if secure:
        bytes_up, bytes_down = bytes_up + secure.bytes_up, secure.bytes_down

    enough = len(accepted) >= config.min_survivors
    known = guard.norms() if enough else norms or {}
    if not enough:
        return unchanged()
    if found := guard.contaminated_by():
        return unchanged(found[1], found[0])
    combined = combiner.result()
    for part in (combined.model, tree.nest(combined.extras)):
        if reason := validate_finite(part):
            return unchanged(f"the average is no model ({reason}), and this update is the largest")
    if reason := guard.check_step(combined.model):
        return unchanged(f"the average is no model ({reason}), and this update is the largest")
    model = combined.model
    metrics: dict[str, Any] = {} if private else {"train_loss": loss / examples}
    metrics |= combined.metrics
    metrics |= {"secagg_recovered": secure.recovered} if secure else {}
    states, served = {}, None
    for step in side.methods.steps:
        means = combined.extras.get(step.name) or (extras[step.name].mean() if step.name in extras else {})
        seen = replace(context, average=combined.model, extras=means, participants=len(accepted), updates=kept)
        seen = replace(seen, combined=combined.metrics)
        output = step.server_step(model, dict(server.get(step.name, {})), seen)
        if not isinstance(output, ServerOutput):
            raise UserError(f"{step.name}'s server_step must return a ServerOutput, not a {type(output).__name__}")
        parts = (output.model, output.state, output.served or {})
        if reason := next(filter(None, map(validate_finite, parts)), None) or guard.check_step(output.model):
            return unchanged(f"{step.name} returned no model ({reason}), and this update is the largest")
        model, served = output.model, output.served
        states[step.name] = output.state
        metrics |= _checked_metrics(step.name, output.metrics)
    return RoundOutcome(
        combined.model, model, states, accepted, rejected, bytes_up, seconds, metrics, curves, served, known, bytes_down
    )


def _validate_examples(update: Update, held: int | None) -> str | None:
    """Returns why a client's claimed number of examples must not weigh, or None if it may."""
    return None if held in (None, update.examples) else f"it claims {update.examples} examples and holds {held}"


def _validate_steps(update: Update, config: Config) -> str | None:
    """Returns why a client can't have taken as many steps as it claims, or None if it can."""
    most = config.local_steps or config.local_epochs * -(-update.examples // config.batch_size)
    if 1 <= update.steps <= most:
        return None
    return f"it claims {update.steps} steps, and its {update.examples} examples make 1 to {most}"


RESERVED = {
    *(
        "round",
        "lr",
        "dropped",
        "rejected",
        "clients",
        "client_names",
        "repeats",
        "skipped",
        "watch",
        "bytes_up",
        "bytes_down",
        "secagg_recovered",
    ),
    *("client_names", "rmse", "mae", "r2", "f1", "confusion", "attackers", "attack_success"),
    *("train_loss", "accuracy", "loss", "accuracy_raw", "loss_raw", "accuracy_before_refine"),
    *("seconds", "seconds_local", "seconds_server", "seconds_clients", "seconds_eval"),
}
"""Keys of a round's record that are the engine's own."""


def _checked_metrics(method: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A method's metrics as JSON can hold them; refused if they take a key of the engine's, or aren't numbers."""
    if taken := RESERVED & metrics.keys():
        raise UserError(f"{method} returned the metric '{min(taken)}', which is the engine's own: give it another name")
    return {name: _plain(method, name, value) for name, value in metrics.items()}


def _plain(method: str, name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(method, name, each) for key, each in value.items()}
    if getattr(value, "ndim", None) == 0:  # a number of torch's or numpy's
        value = value.item()
    if not isinstance(value, int | float | str):
        raise UserError(f"{method} returned the metric '{name}' as a {type(value).__name__}: metrics are numbers")
    return value

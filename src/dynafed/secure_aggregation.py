"""Secure aggregation: the server learns the sum of the clients' updates, and nothing else about a single one.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017. Client u sends, in
whole numbers modulo 2^64, y_u = x_u + PRG(b_u) + sum over v > u of PRG(s_uv) - sum over v < u of PRG(s_uv). In the sum
over all clients, the masks of pairs cancel. Each client has split its own seed b_u and its private key, by which its
pairs' seeds s_uv can be found, into shares for all. Of a client that sent its update, the others hand over their shares
of b_u; of one that dropped out, those of its key, and with enough of them the server takes out the masks that are left.

This is a simulation in one process. All secrets are drawn from the run's seed, and the group in which keys are agreed
upon is small, so it shows what a server would see, and protects nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dynafed import tree
from dynafed.engine.guard import NormGuard
from dynafed.errors import UserError
from dynafed.messages import Broadcast, Update, validate_update
from dynafed.seeds import Seeds
from dynafed.transforms import TRANSFORMS, UpdateTransform
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.methods.base import Method

NAME = "secure_aggregation"
MASKED = "masked"
PRIME = 2**127 - 1
"""Of the field in which secrets are shared, and of the group in which keys are agreed upon."""
GENERATOR = 43
SECRET_BYTES = 16
"""Of a key, a seed, or a share of one."""
SCALE = 2.0**32
"""One is sent as so many units."""
SUM_RANGE = 2.0**31
"""Sums of weighted changes must be below, for they are sent modulo 2^64 units."""


@dataclass(frozen=True)
class Session:
    """One attempt at a round: its clients, those that will drop out among them, and their public keys."""

    place: tuple[int, int]
    """Round and attempt: every one has other secrets."""
    clients: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def of(cls, broadcast: Broadcast) -> Session:
        """The session that a broadcast invites to."""
        sent = broadcast.extras[NAME]
        keys = tuple(int.from_bytes(bytes(key.tolist()), "little") for key in sent["keys"])
        return cls((broadcast.round, int(sent["attempt"])), tuple(sent["clients"].tolist()), keys)

    @property
    def threshold(self) -> int:
        """Clients without whose shares nothing can be unmasked: more than half."""
        return len(self.clients) // 2 + 1

    def pair_masks(self, client: int, key: int, others: Iterable[int], size: int) -> np.ndarray:
        """The masks of a client with these others, added up, by its private key."""
        publics = dict(zip(self.clients, self.keys, strict=True))
        total = np.zeros(size, np.uint64)
        for other in others:
            mask = prg(pow(publics[other], key, PRIME), size)
            total += mask if client < other else -mask
        return total


def secret(seeds: Seeds, what: str, place: tuple[int, int], client: int, number: int = 0) -> int:
    """A secret that a client draws: its private key ("key"), the seed of its own mask ("self"), or a coefficient."""
    return seeds.key(NAME, what, *place, client, number) % PRIME


def shares(seeds: Seeds, session: Session, what: str, owner: int, points: Sequence[int]) -> list[int]:
    """A polynomial whose value at 0 is a client's secret, at the points of those who get a share (Shamir 1979)."""
    numbers = range(session.threshold)
    coefficients = [secret(seeds, what, session.place, owner, number) for number in numbers]
    found = []
    for point in points:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % PRIME
        found.append(value)
    return found


def reconstruct(points: tuple[int, ...], values: Sequence[int]) -> int:
    """The secret of which these are the shares at these points."""
    return sum(weight * value for weight, value in zip(_weights_at_zero(points), values, strict=True)) % PRIME


@lru_cache(maxsize=8)
def _weights_at_zero(points: tuple[int, ...]) -> list[int]:
    """Lagrange's: the value at 0 of a polynomial is the sum of its values at the points with these weights."""
    weights = []
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


def prg(seed: int, size: int) -> np.ndarray:
    """Numbers modulo 2^64 that look random to whoever doesn't have the seed."""
    return np.asarray(np.random.Philox(key=seed).random_raw(size), np.uint64)


def invite(config: Config, seeds: Seeds, broadcast: Broadcast, clients: Iterable[int], attempt: int) -> Broadcast:
    """The broadcast of one attempt at a round; with secure aggregation, it has its clients and their public keys."""
    if not config.secure_aggregation:
        return broadcast
    invited = sorted(clients)
    keys = [pow(GENERATOR, secret(seeds, "key", (broadcast.round, attempt), client), PRIME) for client in invited]
    sent = {
        "attempt": torch.tensor(attempt),
        "clients": torch.tensor(invited),
        "keys": torch.tensor([list(key.to_bytes(SECRET_BYTES, "little")) for key in keys], dtype=torch.uint8),
    }
    return replace(broadcast, extras={**broadcast.extras, NAME: sent})


class Mask(UpdateTransform):
    """The last transform of a client: checks its own update, as nobody else can, and sends it masked."""

    name = NAME

    def encode(self, update: Update, broadcast: Broadcast, seeds: Seeds) -> Update:
        """One tensor of whole numbers that look random; what the server must not know is in it."""
        config, session = self.config, Session.of(broadcast)
        guard = NormGuard(broadcast.model, None, config.large_updates, config.max_update_norm)
        reason = validate_update(update, broadcast)
        if not reason:
            update, reason = guard.judge(update)
        values = _flat(update, broadcast.model, update.examples if config.weighting == "examples" else 1)
        limit, largest = SUM_RANGE / len(session.clients), float(values.abs().max())
        if not reason and largest > limit:
            reason = f"{largest:.3g} doesn't fit into the sum of {len(session.clients)} clients: at most {limit:.3g}"
        if reason:
            return Update.failed(update.client, reason)
        units = (values * SCALE).round().to(torch.int64).numpy().view(np.uint64)
        own = secret(seeds, "key", session.place, update.client)
        others = [client for client in session.clients if client != update.client]
        units = units + prg(secret(seeds, "self", session.place, update.client), len(units))
        units += session.pair_masks(update.client, own, others, len(units))
        masked = {MASKED: torch.from_numpy(units.view(np.int64))}
        return Update(update.client, masked, 1, 1, 0.0, update.seconds)


class SecureSum:
    """The server's half of one attempt at a round."""

    def __init__(self, config: Config, seeds: Seeds, broadcast: Broadcast, extras_spec: dict[str, Tree]) -> None:
        self.config, self.seeds, self.start = config, seeds, tree.sorted_by_name(broadcast.model)
        self.session = Session.of(broadcast)
        self.extras = tree.sorted_by_name(tree.nest(extras_spec))
        self.size = sum(tensor.numel() for tensor in (*self.start.values(), *self.extras.values())) + 2
        self.recovered = 0
        """Clients that dropped out, and whose masks were taken out of the sum."""
        count = len(self.session.clients)
        self.bytes_down = count * (count - 1) * 2 * SECRET_BYTES
        """Two shares of each client for each other one, which the server passes on."""
        self.bytes_up = self.bytes_down + count * SECRET_BYTES
        """The same, public keys, and later the shares that are handed over."""

    def mean(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Updates that can't count, as failed ones; then the mean of the others, as one. None, if they are too few."""
        total, members = np.zeros(self.size, np.uint64), list[int]()
        layout = Broadcast(self.session.place[0], {MASKED: torch.zeros(self.size, dtype=torch.int64)})
        for update in updates:
            if reason := validate_update(update, layout, {}):
                yield Update.failed(update.client, reason)
            else:
                total += update.model[MASKED].numpy().view(np.uint64)
                members.append(update.client)
        if len(members) >= self.session.threshold:
            total = self._unmasked(total, members)
            yield self._read(torch.from_numpy(total.view(np.int64)).double() / SCALE, members)

    def _unmasked(self, total: np.ndarray, members: list[int]) -> np.ndarray:
        """The sum without the members' own masks, and without those of their pairs with clients that dropped out."""
        session = self.session
        self.bytes_up += len(members) * len(session.clients) * SECRET_BYTES
        points = tuple(session.clients.index(member) + 1 for member in members[: session.threshold])
        for client in session.clients:
            # Never both: with its key and its own seed, a client's update would be bare.
            what = "self" if client in members else "key"
            found = reconstruct(points, shares(self.seeds, session, what, client, points))
            if what == "self":
                total = total - prg(found, self.size)
            else:
                total = total + session.pair_masks(client, found, members, self.size)
                self.recovered += 1
        return total

    def _read(self, sums: Tensor, members: list[int]) -> Update:
        """The mean as an update that stands for all of its members."""
        sizes = [tensor.numel() for tensor in (*self.start.values(), *self.extras.values())]
        *flat, examples, loss = torch.split(sums, [*sizes, 1, 1])
        weight = float(examples) if self.config.weighting == "examples" else float(len(members))
        parts = iter(flat)
        model = {
            name: tree.cast(start.double() + next(parts).view(start.shape) / weight, start.dtype)
            for name, start in self.start.items()
        }
        extras = {
            name: tree.cast(next(parts).view(spec.shape) / len(members), spec.dtype)
            for name, spec in self.extras.items()
        }
        total = round(float(examples))
        mean_loss = float(loss) / max(1, total)
        return Update(SUM, model, total, 1, mean_loss, 0.0, tree.unnest(extras), members=tuple(members))


SUM = -1
"""Stands for a client's number in an update that is a sum."""


def _flat(update: Update, start: Tree, weight: float) -> Tensor:
    """The weighted change of the model, what is sent beside it, the number of examples, and the sum of their losses."""
    changes = [(update.model[name].double() - start[name].double()) * weight for name in sorted(start)]
    extras = tree.sorted_by_name(tree.nest(update.extras))
    told = torch.tensor([update.examples, update.loss * update.examples], dtype=torch.float64)
    return torch.cat([tensor.double().flatten() for tensor in (*changes, *extras.values(), told)])


def check_secure_aggregation(config: Config, steps: Sequence[Method]) -> None:
    """Refuse what needs more than a sum."""
    if not config.secure_aggregation:
        return
    for step in steps:
        if step.needs.client_models:
            raise UserError(f"{step.name} needs each client's model, and with {NAME} the server has only their sum")
        if step.overrides("setup_client"):
            raise UserError(f"{step.name}'s clients send something before round 1 that isn't summed: not with {NAME}")
        if step.name != "dp" and step.overrides("combiner"):
            raise UserError(f"{step.name} combines the updates one by one, and with {NAME} the server has only a sum")
        if step.name == "dp" and step.settings.clipping == "adaptive":
            raise UserError(f"dp.clipping = 'adaptive' looks at each client's update: with {NAME}, take 'fixed'")
    for name in config.update_transforms:
        if TRANSFORMS.load(name).decode is not UpdateTransform.decode:
            raise UserError(f"{name} must be decoded for each client, and with {NAME} the server has only a sum")
    if config.watch:
        raise UserError(f"watch = {list(config.watch)} follows single clients: not with {NAME}")
    if config.sampled < 2:
        raise UserError(f"{NAME} needs 2 clients a round or more: the sum of one is its update")

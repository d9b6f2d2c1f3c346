"""Settings of differential privacy, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynafed.errors import UserError
from dynafed.settings import setting

if TYPE_CHECKING:
    from dynafed.config import Config


@dataclass(frozen=True)
class DpSettings:
    """Section `dp`: differential privacy for each client as a whole."""

    epsilon: float = setting(0.0, "privacy loss of the whole run; chooses the noise (0: `noise` is given)", low=0)
    delta: float = setting(1e-5, "chance that the promise fails; well below 1 / clients", above=0, high=0.1)
    noise: float = setting(0.0, "noise multiplier: standard deviation of the noise by the clipping norm", low=0)
    clip: float = setting(1.0, "largest norm of a client's change of the model; the first one if adaptive", above=0)
    clipping: str = setting(
        "fixed", "whether the clipping norm follows the clients' norms", choices=("fixed", "adaptive")
    )
    quantile: float = setting(0.5, "share of the clients that adaptive clipping leaves whole", above=0, high=1)
    where: str = setting(
        "central",
        "who adds the noise: a server that sees the clipped updates, or each client to its own",
        choices=("central", "local"),
    )
    secret: str = setting(
        "", "a file whose content is mixed into the noise's key: without it, whoever knows the seed knows the noise"
    )


def dp_settings(config: Config) -> DpSettings | None:
    """The settings of a config that asks for differential privacy; None if it doesn't."""
    found = config.sections.get("dp")
    if not isinstance(found, DpSettings):
        return None
    if bool(found.epsilon) == bool(found.noise):
        raise UserError("section dp needs either dp.epsilon, such as 8, or dp.noise, a noise multiplier")
    if found.delta * config.clients >= 1:
        raise UserError(f"dp.delta = {found.delta:g} promises nothing with {config.clients} clients: take 1e-5")
    if found.where == "local" and found.clipping == "adaptive":
        raise UserError("dp.clipping = 'adaptive' needs dp.where = 'central': with local noise nobody sees the norms")
    return found

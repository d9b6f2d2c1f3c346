"""The privacy loss of a run, by Google's dp-accounting.

The unit is a client: two federations are neighbors if one client is replaced by another. A round draws a fixed number
of clients without replacement. The loss is bounded in two ways, by Rényi differential privacy of the subsampled
Gaussian mechanism (Wang, Balle, Kasiviswanathan 2019) and of the plain one, as if every client took part in every
round; the smaller bound counts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dynafed.errors import UserError

ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 192, 256, 512)
"""Of the Rényi divergences that are tried."""
SENSITIVITY = 2.0
"""Replacing one client changes the sum of clipped updates by at most twice the clipping norm."""
LARGEST_NOISE = 1e6


@lru_cache(maxsize=4096)
def spent(noise: float, releases: int, clients: int, sampled: int, delta: float, local: bool = False) -> float:
    """Epsilon after so many noisy averages; `noise` is the standard deviation by the clipping norm."""
    if not releases:
        return 0.0
    dp, rdp = _library()
    gaussian = dp.GaussianDpEvent(noise / SENSITIVITY)
    events = [gaussian]
    if not local and sampled < clients:
        events.append(dp.SampledWithoutReplacementDpEvent(clients, sampled, gaussian))
    found = []
    for event in events:
        accountant = rdp.RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE)
        accountant.compose(dp.SelfComposedDpEvent(event, releases))
        found.append(float(accountant.get_epsilon(delta)))
    return min(found)


def noise_for(epsilon: float, releases: int, clients: int, sampled: int, delta: float, local: bool = False) -> float:
    """The smallest noise multiplier, to one part in a thousand, with which so many releases cost at most `epsilon`."""
    low, high = 0.0, 1.0
    while spent(high, releases, clients, sampled, delta, local) > epsilon:
        low, high = high, 2 * high
        if high > LARGEST_NOISE:
            raise UserError(
                f"dp.epsilon = {epsilon:g} is out of reach with {releases} rounds: take fewer, or more epsilon"
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if spent(middle, releases, clients, sampled, delta, local) > epsilon:
            low = middle
        else:
            high = middle
    return high


def _library() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise UserError("differential privacy needs an accountant: pip install 'dynafed[dp]'") from None
    return dp_accounting, rdp

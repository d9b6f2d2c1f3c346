"""DynaFed on Flower: a strategy that wraps any other, and every method of ours as a client app and a server app."""

import dynafed.flower.environment  # noqa: F401 (before Flower is imported)

try:
    import flwr  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError("dynafed.flower needs Flower: pip install dynafed[flower]", name="flwr") from None

from dynafed.flower.apps import client_app, server_app
from dynafed.flower.average import Average
from dynafed.flower.refiner import Refiner
from dynafed.flower.strategy import DynaFed

__all__ = ["Average", "DynaFed", "Refiner", "client_app", "server_app"]

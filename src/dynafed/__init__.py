"""Federated learning that works when the clients' data are nothing alike."""

from dynafed.config import Config
from dynafed.engine.run import Result, resume, run
from dynafed.errors import Interrupted, UserError
from dynafed.version import __version__

__all__ = ["Config", "Interrupted", "Result", "UserError", "__version__", "resume", "run"]

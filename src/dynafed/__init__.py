"""Federated learning that works when the clients' data are nothing alike."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dynafed.errors import Interrupted, RunFailed, UserError

if TYPE_CHECKING:
    from dynafed.callbacks import Callback, EarlyStopping, RunContext
    from dynafed.config import Config
    from dynafed.engine.compare import Comparison, compare
    from dynafed.engine.result import Result
    from dynafed.engine.run import resume, run
    from dynafed.methods import Method
    from dynafed.predictor import Predictor, load
    from dynafed.synthesis.synthesize import synthesize
    from dynafed.version import __version__

__all__ = [
    "Callback",
    "Comparison",
    "Config",
    "EarlyStopping",
    "Interrupted",
    "Method",
    "Predictor",
    "Result",
    "RunContext",
    "RunFailed",
    "UserError",
    "__version__",
    "compare",
    "load",
    "resume",
    "run",
    "synthesize",
]

_LAZY = {
    "Callback": "dynafed.callbacks",
    "Comparison": "dynafed.engine.compare",
    "Config": "dynafed.config",
    "EarlyStopping": "dynafed.callbacks",
    "Method": "dynafed.methods",
    "Predictor": "dynafed.predictor",
    "Result": "dynafed.engine.result",
    "RunContext": "dynafed.callbacks",
    "__version__": "dynafed.version",
    "compare": "dynafed.engine.compare",
    "load": "dynafed.predictor",
    "resume": "dynafed.engine.run",
    "run": "dynafed.engine.run",
    "synthesize": "dynafed.synthesis",
}
"""Where the public names are. They are imported when they are first used, because torch takes a second or two."""

_MODULES = (
    "callbacks",
    "config",
    "data",
    "loggers",
    "methods",
    "models",
    "settings",
    "synthesis",
    "transforms",
    "tree",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dynafed.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'dynafed' has no attribute '{name}'")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

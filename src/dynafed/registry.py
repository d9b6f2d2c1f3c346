"""Named parts that a config can ask for: built in, from other packages, or by their place in a module."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from dynafed.errors import UserError, first_line
from dynafed.settings import nearest

T = TypeVar("T")

Builtin = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class Registry(Generic[T]):
    """Parts of one kind by name. A part is imported when it is first asked for.

    `key` is the config key that names such a part. `builtin` maps names to parts, or to "module:attribute"; or is a
    function that returns such a mapping, called on first use. Another package adds its own with an entry point in the
    group `dynafed.<kind>s`. A name that has a colon, "package.module:Name", is imported as it is.
    """

    def __init__(self, kind: str, builtin: Builtin, *, key: str | None = None) -> None:
        self.kind, self.key = kind, key or kind
        self._builtin = builtin
        self._added: dict[str, T] = {}
        self._loaded: dict[str, T] = {}

    def add(self, name: str, part: T) -> None:
        """Register a part of the running program. A second definition of the same class replaces the first.

        A script that runs as a program and is imported, too, defines its classes twice.
        """
        before = self._added.get(name)
        if before is not None and not _same_origin(before, part):
            raise UserError(f"two {self.kind}s are called '{name}': {_origin(before)} and {_origin(part)}")
        self._added[name] = part

    def remove(self, name: str) -> None:
        """Take back what `add` registered."""
        self._added.pop(name, None)

    def names(self) -> list[str]:
        """The names of all parts: built in, installed, added; without duplicates."""
        return list(dict.fromkeys([*self._builtins, *self._installed, *self._added]))

    def __contains__(self, name: str) -> bool:
        return name in self._builtins or name in self._installed or name in self._added

    def check(self, name: str) -> None:
        """Raise `UserError` for a name that can't be one of this kind; imports nothing."""
        if name not in self and ":" not in name:
            raise UserError(
                f"unknown {self.kind} '{name}': {nearest(name, self.names())} (your own: package.module:Name)"
            )

    def load(self, name: str) -> T:
        """The part of this name."""
        self.check(name)
        if name in self._added:
            return self._added[name]
        if name not in self._loaded:
            self._loaded[name] = self._import(name)
        return self._loaded[name]

    @property
    def group(self) -> str:
        """The entry-point group of other packages."""
        return f"dynafed.{self.kind}s"

    @cached_property
    def _builtins(self) -> Mapping[str, Any]:
        return self._builtin() if callable(self._builtin) else self._builtin

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def _import(self, name: str) -> T:
        part: Any = self._builtins.get(name, name if ":" in name else None)
        try:
            if part is None:
                part = self._installed[name].load()
            elif isinstance(part, str):
                module, _, attribute = part.partition(":")
                if ":" in name:
                    _search_current_folder()
                part = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise UserError(f"{self.key} = '{name}' can't be imported: {first_line(error)}") from None
        return part  # type: ignore[no-any-return]


def _search_current_folder() -> None:
    """Let `mine:Name` find mine.py in the current folder, after everything that is installed."""
    if "" not in sys.path:
        sys.path.append("")
        importlib.invalidate_caches()


def _same_origin(one: Any, other: Any) -> bool:
    modules = {getattr(part, "__module__", "?") for part in (one, other)}
    return _origin(one) == _origin(other) or (
        "__main__" in modules and getattr(one, "__qualname__", 1) == getattr(other, "__qualname__", 2)
    )


def _origin(part: Any) -> str:
    return f"{getattr(part, '__module__', '?')}.{getattr(part, '__qualname__', type(part).__qualname__)}"


def required_arguments(function: Any) -> int:
    """How many arguments must be given by position; 0 for the few built-in callables that don't tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.default is one.empty and one.kind in positional for one in parameters)

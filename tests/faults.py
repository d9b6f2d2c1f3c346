"""A disk that fails: the n-th of all operations that write in a folder, and those after it unless it is only once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPERATIONS = ("open", "fsync", "replace", "mkdir")


class Faults:
    """Counts the operations that write in `folder`; from number `left` on they raise, as a full disk does.

    `replace` sets an attribute for as long as the faults last, as `monkeypatch.setattr` does.
    """

    def __init__(self, replace: Callable[..., None], folder: Path, code: int, once: bool = False) -> None:
        self.left, self.done, self.folder, self.code, self.once = -1, 0, str(folder), code, once
        for name in OPERATIONS:
            replace(os, name, self._wrapped(getattr(os, name), name))

    def _wrapped(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(target: Any, *more: Any, **options: Any) -> Any:
            writes = name != "open" or (more and more[0] & (os.O_WRONLY | os.O_RDWR))
            if writes and (name == "fsync" or str(target).startswith(self.folder)):
                self.done += 1
                if 0 <= self.left < self.done and not (self.once and self.done > self.left + 1):
                    raise OSError(self.code, os.strerror(self.code))
            return real(target, *more, **options)

        return call

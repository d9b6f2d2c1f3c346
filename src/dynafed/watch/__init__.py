"""`dynafed watch`: a page on this machine that follows runs as they go. It only reads their files."""

from __future__ import annotations

from dynafed.watch.server import WatchServer

__all__ = ["WatchServer"]

"""`dynafed watch`."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from pathlib import Path

from dynafed.cli.common import Commands, add_command, err, out, raise_on_interrupt


def register(commands: Commands) -> None:
    """Add the command."""
    watch = add_command(commands, "watch", _watch, "Follow runs as they go, on a page of this machine; it only reads.")
    watch.add_argument("paths", nargs="*", metavar="DIR", type=Path, help="runs, or folders of runs (default: runs)")
    watch.add_argument("--port", type=int, metavar="N", help="default: 8321, or any that is free; 0: any that is free")
    watch.add_argument("--no-browser", action="store_true", help="only print the address")


def _watch(args: argparse.Namespace) -> None:
    from dynafed.watch import WatchServer

    raise_on_interrupt()
    paths = args.paths or [Path("runs")]
    with WatchServer(paths, args.port) as server:
        for path in paths:
            if not path.exists():
                err.print(f"there is no folder {path} yet: the page waits for it", highlight=False)
        out.print(f"live page: {server.address}   (Ctrl-C ends it)", highlight=False)
        if not args.no_browser and _has_screen():
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("ended; the runs go on")


def _has_screen() -> bool:
    """Whether a browser would open in a window: on a server, a text browser would take the terminal over."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))

"""The server of the live page: this machine only, reading only, four addresses."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dynafed.errors import UserError
from dynafed.report.page import Page
from dynafed.report.single import run_page
from dynafed.report.text import to_json_data
from dynafed.watch.page import live_page, run_id
from dynafed.watch.status import Status, Watcher

HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names that a browser may ask for. A page of another site that lets its own name lead here is refused."""

PORT = 8321
"""Tried first if none is given."""

LASTS = 1.0
"""Seconds for which what was found answers all who ask."""


class WatchServer(ThreadingHTTPServer):
    """Serves the live page of the runs in `paths` on the loopback interface; `port` 0 is any that is free."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int | None = None) -> None:
        self.watcher = Watcher(paths)
        self._lock = threading.Lock()
        self._looked: tuple[float, list[Status]] = (-LASTS, [])
        try:
            super().__init__(("127.0.0.1", PORT if port is None else port), Handler)
        except (OSError, OverflowError) as error:
            if port is not None:
                raise UserError(f"--port {port}: {getattr(error, 'strerror', None) or error}") from None
            super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def look(self) -> list[Status]:
        """The runs as they are, or were a moment ago."""
        with self._lock:
            if time.monotonic() - self._looked[0] >= LASTS:
                self._looked = time.monotonic(), self.watcher.look()
            return self._looked[1]

    def page(self) -> Page:
        """The live page."""
        return live_page(self.look(), self.watcher.paths)

    @cached_property
    def script(self) -> str:
        """What asks for the page's state and shows it."""
        return (resources.files("dynafed.watch") / "live.js").read_text("utf-8")


class Handler(BaseHTTPRequestHandler):
    """Answers GET for `/`, `/state` and `/run/ID`; all else is an error."""

    server: WatchServer
    timeout = 20
    server_version = "dynafed"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer one request."""
        if not _is_local(self.headers.get("Host", "")):
            self._answer(403, "text/plain", "This page is only for a browser on this machine.\n")
            return
        asked = urlsplit(self.path)
        try:
            if asked.path == "/":
                self._answer(200, "text/html", self.server.page().html(self.server.script))
            elif asked.path == "/state":
                self._state(parse_qs(asked.query).get("seen", [""])[0])
            elif asked.path.startswith("/run/"):
                self._report(asked.path.removeprefix("/run/"))
            else:
                self._answer(404, "text/plain", "There is no such page.\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
        except Exception as error:  # a damaged run mustn't end the watch
            self._answer(500, "text/plain", f"{type(error).__name__} while making the page.\n")

    def _state(self, seen: str) -> None:
        page = self.server.page()
        state: dict[str, Any] = {"title": page.title, "html": page.body(), "charts": page.charts}
        text = json.dumps(to_json_data(state), allow_nan=False, separators=(",", ":"))
        version = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        if seen == version:
            self._answer(204, "application/json", "")
        else:
            self._answer(200, "application/json", f'{{"version":"{version}",{text[1:]}')

    def _report(self, wanted: str) -> None:
        run = next((status.run for status in self.server.look() if run_id(status.run.path) == wanted), None)
        if run is None:
            self._answer(404, "text/plain", "There is no such run.\n")
        else:
            self._answer(200, "text/html", run_page(run, run.path))

    def _answer(self, code: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if code != 204:
            self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing: the terminal belongs to the user."""


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine; the port may differ, behind an SSH tunnel."""
    name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
    return name.lower() in HOSTS and (not port or port.isdecimal())

"""A headless Chromium, driven through pipes by the DevTools protocol: widths, themes, console, screenshots."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

HELPERS, FAULTS = (Path(__file__).with_name(f"page_{name}.js").read_text() for name in ("helpers", "faults"))
"""What tests do in a page, and a list of all that is wrong with how a page looks."""


class Browser:
    """One page at a time; `errors` holds what its console or its scripts complained about."""

    def __init__(self, profile: Path) -> None:
        self.errors: list[str] = []
        self.loaded = False
        self.count = 0
        self.rest = b""
        inbox, self.outbox = os.pipe()
        self.inbox, outbox = os.pipe()

        # The browser reads commands from descriptor 3 and answers on 4.
        place = "import os, sys; a, b, *c = sys.argv[1:]; os.dup2(int(a), 100); os.dup2(int(b), 101); "
        place += "os.dup2(100, 3); os.dup2(101, 4); os.execv(c[0], c)"
        command = [
            sys.executable, "-c", place, str(inbox), str(outbox), str(BROWSER), "--headless", "--no-sandbox",
            "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}", "--remote-debugging-pipe",
            "about:blank",
        ]  # fmt: skip
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, pass_fds=(inbox, outbox), stdout=quiet, stderr=quiet)
        os.close(inbox)
        os.close(outbox)
        self.session = ""
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self.outbox)
        self.process.kill()
        self.process.wait()
        os.close(self.inbox)

    def send(self, method: str, **params: Any) -> Any:
        """Send a command and return its result; events that come first are noted."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.outbox, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path | str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Show a file, or an address, in a window of that width."""
        self.errors.clear()
        self.loaded = False
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.send("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not self.loaded:
            self._receive()

    def run(self, script: str) -> Any:
        """What the body of a function returns in the page."""
        answer = self.send(
            "Runtime.evaluate", expression=f"(() => {{{script}}})()", returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            more = os.read(self.inbox, 1 << 20)
            assert more, "the browser ended"
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown" or (
            method == "Runtime.consoleAPICalled" and params["type"] == "error"
        ):
            self.errors.append(json.dumps(params)[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        return message

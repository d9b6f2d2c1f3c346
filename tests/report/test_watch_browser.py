"""The live page in a real browser: it follows a run, and keeps what the reader has chosen."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, FAULTS, HELPERS, Browser
from fake_runs import MakeRun, add_synthetic, synthesis_record

from dynafed.watch import WatchServer

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")


def wait_for(browser: Browser, condition: str) -> None:
    """Until an expression is true in the page; polls are two seconds apart."""
    give_up = time.monotonic() + 30
    while not browser.run(f"return {condition}"):
        assert time.monotonic() < give_up, condition
        time.sleep(0.1)


def append_round(path: Path, number: int, **more: Any) -> None:
    record = {"round": number, "accuracy": 0.5, "loss": 1.0, "seconds": 1.0, "clients": [1], **more}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_it_follows_runs_and_keeps_what_was_chosen(make_run: MakeRun, browser: Browser, tmp_path: Path) -> None:
    first = make_run("a", rounds=30, planned=40, finished=False)
    second = make_run("b", rounds=30, planned=40, finished=False, method="dynafed", each=synthesis_record)
    with WatchServer([tmp_path], 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            for width in (1280, 390):
                for dark in (False, True):
                    browser.open(server.address, width, dark=dark)
                    wait_for(browser, "document.querySelectorAll('.plot svg').length === 2")
                    assert browser.run(FAULTS) == []
            browser.run(
                HELPERS
                + """
                document.querySelector("[data-smooth='5']").click();
                document.querySelectorAll(".key")[0].click();
                tools(plots()[0])[0].click();
                plots()[0].focus();
                window.kept = plots()[0];
                """
            )
            append_round(first, 31)
            append_round(second, 31)
            add_synthetic(second)
            (second / "synthesis.jsonl").write_text('{"0": 1.0}\n{"1": 0.9}\n{"2": 0.8}\n')
            wait_for(browser, "document.querySelectorAll('.plot svg').length === 3")
            answer = browser.run(
                HELPERS
                + """
                const pressed = what => document.querySelector(what).getAttribute("aria-pressed");
                press(plots()[0], "End");
                return {
                  same: plots()[0] === window.kept, focused: document.activeElement === window.kept,
                  open: Boolean(plots()[0].closest(".panel").querySelector(".behind")),
                  smooth: pressed("[data-smooth='5']"), hidden: pressed(".key"), tip: tip().textContent,
                  values: [...document.querySelectorAll("progress")].map(bar => bar.value),
                  images: document.querySelectorAll(".images img").length,
                  live: document.querySelector("#live").textContent,
                };
                """
            )
            assert answer == {
                "same": True,
                "focused": True,
                "open": True,
                "smooth": "true",
                "hidden": "false",
                "tip": "round 31dynafed50.00\u202f%",
                "values": [31, 31],
                "images": 3,
                "live": "live",
            }
            assert browser.run(FAULTS) == []
            assert browser.errors == []
        finally:
            server.shutdown()
            thread.join()
    wait_for(browser, "document.querySelector('#live.lost') !== null")
    browser.open("about:blank")

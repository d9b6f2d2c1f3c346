"""`dynafed watch`: what it reads from run folders, what its server answers, and to whom."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_runs import MakeRun, add_synthetic, synthesis_record
from PIL import Image
from problems import run_tiny

from dynafed.engine.files import SAMPLES_NOW, is_locked, lock_folder
from dynafed.errors import UserError
from dynafed.synthesis.figures import SynthesisFigures, write_png
from dynafed.watch import WatchServer
from dynafed.watch.page import live_page, run_id, time_left
from dynafed.watch.status import FRESH, Status, Watcher

NOW_SECONDS = 2_000_000_000.0


def look(path: Path, now: float = NOW_SECONDS) -> Status:
    (status,) = Watcher([path]).look(now)
    return status


def aged(path: Path, *ages: tuple[str, float]) -> Path:
    """Let files look as if they had been written so many seconds ago; the others very long ago."""
    for file in path.iterdir():
        os.utime(file, (1e9, 1e9))
    for name, age in ages:
        os.utime(path / name, (NOW_SECONDS - age, NOW_SECONDS - age))
    return path


def test_a_run_is_running_while_it_holds_its_lock(make_run: MakeRun) -> None:
    path = aged(make_run(rounds=5, planned=20, finished=False))
    watcher = Watcher([path])
    assert watcher.look()[0].state == "stopped"
    if sys.platform == "linux":
        with lock_folder(path):
            assert is_locked(path)
            assert watcher.look()[0].state == "running"
        assert watcher.look()[0].state == "stopped"
        aged(path, ("metrics.jsonl", 1))
        assert watcher.look(NOW_SECONDS)[0].state == "stopped"  # its lock was seen before: it decides
    assert look(aged(path, ("metrics.jsonl", FRESH - 1))).state == "running"
    assert look(aged(path, ("metrics.jsonl", FRESH + 1))).state == "stopped"
    done = aged(make_run("done"))
    assert look(done).state == "done"
    aged(make_run("done", planned=40))  # resumed for more rounds: what it had found before is still there
    assert look(done).state == "stopped"
    (done / "summary.json").write_text('{"stopped": "target reached"}')
    assert look(aged(done)).state == "done"


def test_time_left_is_that_of_the_rounds_left(make_run: MakeRun) -> None:
    path = aged(make_run(rounds=5, planned=20, finished=False), ("metrics.jsonl", 0.8))
    status = look(path)
    assert status.rounds == (5, 20)
    assert status.seconds_left == pytest.approx(15 * 1.8 - 0.8)
    assert time_left(status) == "26\u202fs left"
    path = aged(make_run("d", rounds=2, planned=9, finished=False, method="moon+dynafed"), ("metrics.jsonl", 0))
    assert time_left(look(path)).endswith(" left, and a synthesis")
    (path / "metrics.jsonl").unlink()
    assert time_left(look(aged(path, ("config.toml", 0)))) == "starting"


def test_a_synthesis_under_way_has_its_own_time(make_run: MakeRun) -> None:
    path = make_run(rounds=5, planned=8, finished=False, method="dynafed", sections={"dynafed": {"iterations": 200}})
    losses = path / "synthesis.jsonl"
    losses.write_text("".join(json.dumps({n: 1 / (n + 1)}) + "\n" for n in range(11)) + '{"11": 0.')
    watcher = Watcher([aged(path, ("metrics.jsonl", 30), ("synthesis.jsonl", 0))])
    (status,) = watcher.look(NOW_SECONDS)
    assert (status.iterations, status.seconds_left, status.synthesis_ahead) == ((10, 200), None, False)
    assert time_left(status) == "time left not known yet"
    with losses.open("a") as file:
        file.write("\n" + "".join(json.dumps({n: 0.5}) + "\n" for n in range(12, 21)))
    aged(path, ("metrics.jsonl", 30), ("synthesis.jsonl", -5))
    (status,) = watcher.look(NOW_SECONDS + 5)
    assert status.iterations == (20, 200)
    assert status.seconds_left == pytest.approx(3 * 1.8 + 180 * 0.5)
    assert list(status.losses)[-1] == 20


def test_the_samples_of_now_are_there_while_they_form(tmp_path: Path) -> None:
    import torch

    figures = SynthesisFigures(tmp_path, 200)
    assert figures.update_every == 4
    figures.on_iteration(4, 0.5, torch.rand(3, 1, 4, 4))
    assert (tmp_path / SAMPLES_NOW).stat().st_size > 50
    figures.on_iteration(5, 0.5, torch.rand(3, 6))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["synthesis.jsonl", SAMPLES_NOW]


def test_the_page_shows_rounds_curves_samples_and_the_way_to_go_on(make_run: MakeRun, tmp_path: Path) -> None:
    import torch

    going = make_run(
        "a b", rounds=9, planned=20, finished=False, method="dynafed", each=synthesis_record,
        sections={"dynafed": {"iterations": 200}},
    )  # fmt: skip
    add_synthetic(going)
    (going / "synthesis.jsonl").write_text('{"0": 1.0}\n{"1": 0.9}\n')
    write_png(going / SAMPLES_NOW, torch.rand(3, 1, 4, 4), 10)
    (going / "synthetic-000125.png").unlink()
    (going / "synthetic-000125.png").symlink_to(going / "synthetic-000200.png")
    (going / "synthetic-000130.png").write_text("no picture")
    Image.new("L", (4000, 1001)).save(going / "synthetic-000140.png")
    aged(going, ("metrics.jsonl", 9), ("synthesis.jsonl", 0))
    aged(make_run("old", rounds=3, planned=20, finished=False, method="<script>x"))
    make_run("done")
    page = live_page(Watcher([tmp_path]).look(NOW_SECONDS), [tmp_path])
    text = page.body()
    assert page.title == "1 running, 1 stopped, 1 done · dynafed watch"
    assert "synthesis, iteration 1 of 200" in text
    assert '<progress max="20" value="9"' in text
    assert [chart["title"] for chart in page.charts.values()] == ["Accuracy", "Loss", "Matching loss"]
    assert re.findall(r"<figcaption>(iteration \d+|now)</figcaption>", text) == ["iteration 0", "iteration 200", "now"]
    assert "dynafed resume" in text
    assert "<script>" not in text
    alone = live_page(Watcher([going]).look(NOW_SECONDS), [going])
    assert alone.title == "dynafed on fmnist-mini · dynafed watch"
    assert live_page([], [tmp_path]).title.startswith("Waiting for a run")


def test_of_very_many_runs_the_newest_are_shown(make_run: MakeRun, tmp_path: Path) -> None:
    for number in range(32):
        aged(make_run(f"{number:02d}", rounds=1, seed=number, alpha=1.0 + number), ("metrics.jsonl", number))
    page = live_page(Watcher([tmp_path]).look(), [tmp_path])
    assert page.body().count("<progress") == 30
    assert "and 2 older ones" in page.body()
    assert len(page.charts["c0"]["series"]) == 12


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    with WatchServer([tmp_path], 0) as made:
        made._looked = (float("-inf"), [])
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: WatchServer, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read().decode()
    connection.close()
    return found


def test_it_answers_only_a_browser_of_this_machine(server: WatchServer, make_run: MakeRun) -> None:
    make_run()
    assert server.server_address[0] == "127.0.0.1"
    for host in ("127.0.0.1:8321", "localhost", "LOCALHOST:9000", "[::1]:80"):
        assert ask(server, "/", Host=host)[0] == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example:8321", "localhost:80:80", "", "[::1]x", "127.0.0.1:x"):
        for path in ("/", "/state", "/nothing"):
            code, _, text = ask(server, path, Host=host)
            assert (code, "fmnist" in text) == (403, False), host


def test_it_serves_nothing_but_its_pages(server: WatchServer, make_run: MakeRun) -> None:
    path = make_run()
    code, headers, text = ask(server, f"/run/{run_id(path)}")
    assert (code, "The whole config" in text) == (200, True)
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers
    for place in (
        "/run/config.toml",
        "/run/",
        "/../../etc/passwd",
        "/run/../config.toml",
        "/%2e%2e/x",
        "/state/",
    ):
        assert ask(server, place)[0] == 404, place
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert ask(server, "/", method)[0] == 501
    before = sorted(file.name for file in path.iterdir())
    ask(server, "/")
    assert sorted(file.name for file in path.iterdir()) == before


def test_the_state_is_sent_when_it_changes(
    server: WatchServer, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynafed.watch.server.LASTS", 0.0)
    empty = json.loads(ask(server, "/state")[2])
    assert "No run is here yet" in empty["html"]
    assert ask(server, f"/state?seen={empty['version']}")[0] == 204
    path = make_run(rounds=4)
    one = json.loads(ask(server, f"/state?seen={empty['version']}")[2])
    assert len(one["charts"]["c0"]["series"][0]["x"]) == 4
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "accuracy": NaN, "loss": Infinity, "seconds": 1.0}\n')
    two = json.loads(ask(server, f"/state?seen={one['version']}")[2])
    assert two["charts"]["c0"]["series"][0]["y"][4] is None
    (path / "config.toml").write_text("no toml")
    assert "No run is here yet" in json.loads(ask(server, "/state")[2])["html"]


def test_a_page_that_fails_does_not_end_it(server: WatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("secret")

    with monkeypatch.context() as patch:
        patch.setattr("dynafed.watch.server.live_page", fail)
        assert ask(server, "/")[::2] == (500, "RuntimeError while making the page.\n")
    assert ask(server, "/")[0] == 200


def test_nothing_of_a_run_is_imported(
    server: WatchServer, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "watched_evil.py").write_text("raise SystemExit")
    keys = dict.fromkeys(("method", "model", "dataset", "partition", "engine"), "watched_evil:x")
    path = make_run("evil", callbacks=["watched_evil:x"], **keys)
    for place in ("/", f"/run/{run_id(path)}"):
        code, _, text = ask(server, place)
        assert (code, "watched_evil" in text) == (200, True)
    assert "watched_evil" not in sys.modules


def test_a_file_and_a_bad_port_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is a file: dynafed watch needs a run's folder"):
        WatchServer([tmp_path / "file"], 0)
    with WatchServer([tmp_path], 0) as first, pytest.raises(UserError, match=r"^--port \d+: .*in use"):
        WatchServer([tmp_path], first.server_address[1])
    with pytest.raises(UserError, match=r"^--port 70000: "):
        WatchServer([tmp_path], 70000)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_the_command_says_where_it_is_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    run_tiny(tmp_path / "runs" / "one", rounds=1)
    command = [sys.executable, "-m", "dynafed", "watch", "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"live page: http://127\.0\.0\.1:(\d+)/   \(Ctrl-C ends it\)\n", line)
        assert found, line
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
        connection.request("GET", "/")
        assert "fedavg" in connection.getresponse().read().decode()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
        assert (process.returncode, rest) == (0, "ended; the runs go on\n")
    finally:
        process.kill()

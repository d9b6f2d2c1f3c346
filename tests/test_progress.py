"""What is seen of a run while it goes on: in a terminal, in a log, in a notebook, from Python."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from problems import TEST, TRAIN, run_tiny, tiny
from rich.console import Console

import dynafed
from dynafed import progress, stages, terminal
from dynafed.notebook import NotebookView
from dynafed.progress import Progress, RunProgress, Stage, clock
from dynafed.terminal import LineView, ProgressBar, View, frame

FAST = ["-s", "dataset=digits", "-s", "clients=4", "-s", "mlp.width=8", "-s", "rounds=20", "--workers", "2"]


def in_a_terminal(arguments: list[str], interrupt_at: str = "") -> tuple[str, int]:
    """All that a terminal of 80 columns gets from a command, and its exit code; Ctrl-C when a text is seen."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "dynafed", *arguments]
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    child = subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment | {"TERM": "xterm"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(follower)
    seen, patience = b"", time.monotonic() + 60
    while True:
        if not select.select([leader], [], [], max(0, patience - time.monotonic()))[0]:
            os.killpg(child.pid, signal.SIGKILL)
            raise AssertionError(seen.decode()[-2000:])
        try:
            piece = os.read(leader, 4096)
        except OSError:
            break
        seen += piece
        if not piece:
            break
        if interrupt_at and interrupt_at in seen.decode(errors="replace"):
            os.write(leader, b"\x03")
            interrupt_at = ""
    os.close(leader)
    return seen.decode(), child.wait(60)


def lines_of(screen: str) -> list[str]:
    """The lines that were drawn, without what only moves the cursor or colors."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen))


def test_a_terminal_sees_every_stage_and_a_line_for_each_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    screen, code = in_a_terminal(["compare", *FAST, "-s", "rounds=100", "--methods", "fedavg,fedprox", "--out", "c"])
    assert code == 0
    lines = lines_of(screen)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("loading torch")
    drawn = "\n".join(lines)
    for text in ("fedavg seed-0", "round ", "accuracy ", "s a round", "run 1 of 2", "run 2 of 2", "left in all"):
        assert text in drawn, text
    for done in (r"^1/2 fedavg seed-0: accuracy \d+\.\d\d %, 0:\d\d$", r"^2/2 fedprox seed-0: "):
        assert re.search(done, drawn, flags=re.MULTILINE)
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")  # the cursor is back


@pytest.mark.parametrize("moment", ["loading torch", "accuracy"])
def test_interrupted_at_any_time_it_leaves_no_traceback(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    screen, code = in_a_terminal(["run", *FAST, "-s", "rounds=100000", "--out", "r"], interrupt_at=moment)
    assert code == 130
    assert "Traceback" not in screen
    said = "dynafed: interrupted; continue with: dynafed resume r" if moment == "accuracy" else "dynafed: interrupted"
    assert [line for line in lines_of(screen) if line][-1] == said
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")


class Diary(View):
    """Notes what it is shown."""

    period = 0.001

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.said: list[str] = []

    def draw(self, progress: Progress) -> None:
        self.seen.append(str(progress))

    def say(self, line: str) -> None:
        self.said.append(line)


def test_the_thread_rests_during_a_fork() -> None:
    diary = Diary()
    with ProgressBar("run", Console(file=io.StringIO()), diary) as bar:
        child = os.fork()
        if child == 0:
            os._exit(threading.active_count() == 1 and not terminal._shown)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert bar.thread is not None
        assert bar.thread.is_alive()
        threads = threading.active_count()
    assert threading.active_count() == threads - 1
    assert stages.current() is None


def test_a_run_tells_the_bar_around_it(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []

    class Bar(ProgressBar):
        def on_stage(self, name: str, done: int, total: int) -> None:
            told.append((name, done, total))
            super().on_stage(name, done, total)

    diary = Diary()
    with Bar("", Console(file=io.StringIO()), diary) as bar:
        result = run_tiny(tmp_path / "r", workers=2)
    names = list(dict.fromkeys(name for name, _, _ in told))
    assert names == [
        "dividing the data",
        "building the network",
        "starting workers",
        "evaluation",
        "writing the report",
    ]
    assert told[2:5] == [("starting workers", done, 2) for done in range(3)]
    run = bar.progress.run
    assert (run.title, run.round, run.rounds, len(run.round_seconds)) == ("fedavg", 6, 6, 6)
    assert run.value == result.history[-1]["accuracy"]
    assert not diary.said  # a single run needs no line: the caller says more
    assert run.left() == 0


def test_compare_counts_its_runs(tmp_path: Path) -> None:
    diary = Diary()
    with ProgressBar("", Console(file=io.StringIO()), diary) as bar:
        dynafed.compare(
            tiny(dataset="digits", rounds=2), ["fedavg", "fedprox"], [0], tmp_path / "c", callbacks=bar.titled
        )
    assert [line.partition(":")[0] for line in diary.said] == ["1/2 fedavg seed-0", "2/2 fedprox seed-0"]
    assert (bar.progress.number, bar.progress.total, len(bar.progress.run_seconds)) == (2, 2, 2)


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now, strftime=lambda form: "12:00:00"))
    console = Console(file=io.StringIO(), width=80)
    view, shown = LineView(console), Progress(RunProgress("fedavg", rounds=10, round=3, value=0.5))
    shown.run.stage = Stage("clients", 2, 8)
    assert isinstance(ProgressBar("", console).view, LineView)
    lines = []
    for now in (100.0, 109.0, 110.0, 139.0, 140.0, 4000.0, 4100.0, 4400.0):  # noqa: B007
        view.draw(shown)
        lines.append(console.file.getvalue().count("\n"))  # type: ignore[attr-defined]
    assert lines == [0, 0, 1, 1, 2, 3, 3, 4]
    assert console.file.getvalue().startswith("12:00:00 fedavg: round 3 of 10, accuracy 50.00 %")  # type: ignore[attr-defined]


def test_python_is_quiet_without_a_terminal_unless_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "FIRST_LINE", 0.0)
    monkeypatch.setattr(LineView, "period", 0.001)
    for number, wanted in enumerate((None, False)):
        dynafed.run(tiny(), out=tmp_path / str(number), train=TRAIN, test=TEST, progress=wanted)
    assert capsys.readouterr() == ("", "")
    dynafed.run(tiny(), out=tmp_path / "said", train=TRAIN, test=TEST, progress=True)
    assert capsys.readouterr().err.count("\n") == 1
    with ProgressBar("", Console(file=io.StringIO()), diary := Diary()) as bar:
        dynafed.run(tiny(), out=tmp_path / "silent", train=TRAIN, test=TEST, progress=False)
    assert bar.progress.run.rounds == 0
    assert not any("round" in line for line in diary.seen)


def test_a_notebook_gets_a_bar_in_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for IPython, which only notes what it is to display."""
    pages: list[str] = []
    handle = SimpleNamespace(update=pages.append)

    def display(page: str, display_id: bool) -> Any:
        pages.append(page)
        return handle

    fake: Any = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))  # type: ignore[arg-type]
    monkeypatch.setattr(NotebookView, "period", 0.001)
    run_tiny(tmp_path / "r")
    assert re.match(r"<progress style=.*></progress> starting", pages[0])
    assert any(re.search(r'<progress value="3" max="6".*fedavg: round 3 of 6, accuracy', page) for page in pages)
    assert pages[-1] == ""


def test_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    stage = Stage("synthesis", 100, 1000, began=0.0)  # resumed
    assert stage.left() is None
    now = 10.0
    stage.advance(120, 1000)
    assert stage.left() == pytest.approx(440)
    now = 20.0
    assert stage.left() == pytest.approx(430)
    assert str(stage) == "synthesis  120/1000  7:10 left"

    run = RunProgress("dynafed", rounds=10, round_began=20.0, began=20.0)
    run.begin_round(4)
    assert run.left() is None
    now = 22.0
    run.stage.advance(1, 4)
    assert run.left() == pytest.approx(10 * 8 - 2)  # guessed from the first client
    now = 30.0
    run.end_round({"round": 1, "seconds": 10.0, "accuracy": 0.25})
    assert run.measured() == "accuracy 25.00 %"
    run.begin_round(4)
    assert run.left() == pytest.approx(90)
    run.enter("synthesis", 0, 100)
    now = 35.0
    run.enter("synthesis", 1, 100)
    assert run.left() == pytest.approx(85 + 495)

    several = Progress(run, number=2, total=4, run_seconds=[100.0])
    assert several.left() == pytest.approx(580 + 2 * 100)
    words = "run 2 of 4, 13:00 left in all; dynafed: round 1 of 10, accuracy 25.00 %, 9:40 left"
    assert str(several) == f"{words} (synthesis  1/100  8:15 left)"
    console = Console(file=io.StringIO(), width=80)
    console.print(frame(several))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert "round 1/10  accuracy 25.00 %  9:40 left\n" in drawn
    assert "1/100  8:15 left\n" in drawn
    assert "run 2 of 4  13:00 left in all\n" in drawn
    assert max(map(len, drawn.splitlines())) == 80


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3599, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]


def test_it_shows_something_before_torch_is_there(tmp_path: Path) -> None:
    """The first thing that is written comes before torch is imported."""
    script = """
import sys
from rich.console import Console
import dynafed.cli.common as common

class Early(Exception): pass
class Screen:
    encoding = "utf-8"
    def write(self, text):
        assert "torch" not in sys.modules
        print(repr(text))
        raise Early
    def flush(self): pass
    def isatty(self): return True

common.err = Console(file=Screen(), force_terminal=True)
try:
    with common.progress_bar(): pass
except Early:
    print("early")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("early\n"), done.stderr

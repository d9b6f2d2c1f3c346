"""`dynafed runs`: what is listed, in which order, and the index page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from problems import run_tiny

from dynafed import cli
from dynafed.cli import main
from dynafed.engine.files import lock_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: two done, one stopped."""
    base = tmp_path_factory.mktemp("runs")
    for name, alpha, seed in (("a", 0.1, 0), ("b", 10.0, 1), ("sub/c", 0.1, 2)):
        (base / name).parent.mkdir(exist_ok=True)
        run_tiny(base / name, alpha=alpha, seed=seed, rounds=2)
    (base / "sub/c/summary.json").unlink()
    return base


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The names of the runs that a command lists."""
    assert main(["runs", *arguments, "--json"]) == 0
    return [Path(row["run"]).name for row in json.loads(capsys.readouterr().out)["items"]]


def test_they_are_listed_filtered_and_sorted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, str(folder)) == ["a", "b", "c"]
    assert listed(capsys, str(folder), "--where", "alpha<1") == ["a", "c"]
    assert listed(capsys, str(folder), "--where", "alpha<1", "--where", "state=done") == ["a"]
    assert listed(capsys, str(folder), "--where", "method=fed*", "--where", "seed!=0") == ["b", "c"]
    assert listed(capsys, str(folder), "--where", "mlp.width=8", "--sort", "seed", "-r") == ["c", "b", "a"]
    assert listed(capsys, str(folder), "--sort", "alpha") == ["a", "c", "b"]


def test_the_table_shows_what_differs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.common.out, "_width", 200)  # COLUMNS counts only when the console is made
    assert main(["runs", str(folder), "--columns", "best"]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]
    assert head == ["run", "method", "alpha", "seed", "best", "state", "rounds", "accuracy"]
    assert [row[0] for row in rows] == [str(folder / name) for name in ("a", "b", "sub/c")]
    assert [row[-4] for row in rows] == ["done", "done", "stopped"]
    assert main(["runs", str(folder), "--where", "alpha>100"]) == 0
    assert capsys.readouterr().out == "no run meets this\n"


def test_a_narrow_terminal_sees_fewer_columns(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.common.out, "_width", 65)
    assert main(["runs", str(folder)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert table[1].split() == ["run", "method", "alpha", "state", "rounds", "accuracy"]
    assert sum(line.endswith(" % ") for line in table) == 3
    assert last.startswith("not shown: seed ")
    assert main(["runs", str(folder), "--columns", "seed"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[2] == "seed"


def test_a_run_that_goes_on_is_running(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if sys.platform != "linux":
        pytest.skip("who holds a lock is known on Linux only")
    with lock_folder(folder / "sub/c"):
        assert listed(capsys, str(folder), "--where", "state=running") == ["c"]
    assert listed(capsys, str(folder), "--where", "state=running") == []


def test_a_run_resumed_for_more_rounds_is_not_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_tiny(tmp_path / "a", rounds=1)
    if sys.platform == "linux":
        with lock_folder(tmp_path / "a"):
            assert listed(capsys, str(tmp_path), "--where", "state=running") == ["a"]
    config = tmp_path / "a/config.toml"
    config.write_text(config.read_text().replace("rounds = 1\n", "rounds = 3\n"))
    assert listed(capsys, str(tmp_path), "--where", "state=stopped") == ["a"]


def test_the_index_page_links_to_the_reports(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sub/c/report.html").unlink()
    assert main(["runs", str(folder), "--page"]) == 0
    assert capsys.readouterr().out.endswith(f"page: {folder / 'index.html'}\n")
    page = (folder / "index.html").read_text()
    assert '<a href="a/report.html">a</a>' in page
    assert 'href="sub/c' not in page
    assert ">sub/c</td>" in page
    assert "3 runs" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--where", "alhpa=1"], "did you mean 'alpha'"),
        (["--where", "alpha"], "expected a condition"),
        (["--where", "method<3"], "can't be compared"),
        (["--sort", "colour"], "unknown key 'colour'"),
    ],
)
def test_mistakes(folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_it_needs_no_torch(folder: Path) -> None:
    script = f"""
import sys
from dynafed import cli
from dynafed.cli import main
main(["runs", {str(folder)!r}, "--page"])
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")

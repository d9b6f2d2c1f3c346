"""Shell completion: the words for what is typed so far, and the scripts that ask for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dynafed.cli import main
from dynafed.cli.completion import SCRIPTS, complete, method_names
from dynafed.methods import METHODS


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "mine.toml").touch()


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("res", ["resume"]),
        ("run mi", ["mine.toml"]),
        ("run de", ["demo"]),
        ("run demo --work", ["--workers"]),
        ("run -s alph", ["alpha="]),
        ("run -s optimizer=ad", ["optimizer=adam", "optimizer=adamw"]),
        ("run -s dynafed.iter", ["dynafed.iterations="]),
        ("run -s method=fedprox+scaf", ["method=fedprox+scaffold"]),
        ("compare --methods fedavg,dyn", ["fedavg,dynafed"]),
        ("resume ru", ["runs/"]),
        ("report runs/a runs/", ["runs/a/"]),
        ("data che", ["check"]),
        ("data check fmnist-", ["fmnist-mini"]),
        ("config ear", ["early-stopping"]),
        ("completion f", ["fish"]),
        ("comple", ["completion"]),
        ("run --out x", []),
        ("report runs/a -o x", []),
    ],
)
def test_words(typed: str, found: list[str]) -> None:
    assert complete(typed.split(" ")) == found


def test_an_empty_word_gets_every_command() -> None:
    assert {"run", "resume", "compare", "runs", "config", "watch"} <= set(complete([""]))


def test_the_methods_names_are_right() -> None:
    ours = [name for name in METHODS.names() if METHODS.load(name).__module__.startswith("dynafed.methods.")]
    assert sorted(method_names()) == sorted(ours)


def test_torch_is_not_needed() -> None:
    script = """
import sys
from dynafed.cli import main
main(["complete", "--", *sys.argv[1:]])
sys.exit("torch" in sys.modules)
"""
    for typed in ("run -s method=dyn", "run -s lr=", "run de", "compare --methods f"):
        subprocess.run([sys.executable, "-c", script, *typed.split()], check=True, capture_output=True)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_scripts(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "dynafed complete --" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} isn't here")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "dynafed"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dynafed "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}"}
    if shell == "bash":
        script += 'COMP_WORDS=(dynafed run -s alp); COMP_CWORD=3; _dynafed 2>/dev/null; echo "${COMPREPLY[@]}"\n'
        done = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout == "alpha=\n"
    else:
        subprocess.run([shell, "-n"], input=script, text=True, check=True)

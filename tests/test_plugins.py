"""A package of somebody else, installed, with a method, a model, a dataset, a transform and a callback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dynafed import UserError, tree
from dynafed.registry import Registry

OUTSIDE = Path(__file__).with_name("outside")

BY_NAME = {
    "method": "fedprox+pull",
    "model": "wide",
    "dataset": "clouds",
    "callbacks": '["diary"]',
    "update_transforms": '["halve"]',
}
BY_PLACE = {
    "method": "fedprox+outside_fl:Pull",
    "model": "outside_fl:WIDE",
    "dataset": "outside_fl:clouds",
    "callbacks": '["outside_fl:Diary"]',
    "update_transforms": '["outside_fl:Halve"]',
}
COMMON = {
    "clients": 6,
    "participation": 0.5,
    "rounds": 4,
    "checkpoint_every": 1,
    "lr": 0.05,
    "alpha": 1.0,
    "pull.strength": 0.3,
    "wide.width": 12,
    "diary.file": "told.json",
}


def dynafed(*arguments: str) -> str:
    """The command line in a process in which the package is installed."""
    environment = os.environ | {"PYTHONPATH": str(OUTSIDE)}
    done = subprocess.run(
        [sys.executable, "-m", "dynafed", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(out: Path, parts: dict[str, str], **changes: Any) -> Path:
    settings = COMMON | {"workers": 1} | parts | changes
    flags = [flag for key, value in settings.items() for flag in ("-s", f"{key}={value}")]
    empty = out.parent / "empty.toml"
    empty.touch()
    dynafed("run", str(empty), "--out", str(out), *flags)
    return out


def bits(run: Path) -> str:
    state = load_file(sorted((run / "checkpoint").iterdir())[-1] / "state.safetensors")
    return tree.digest({name: tensor for name, tensor in state.items() if name.startswith("model/")})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("outside") / "whole", BY_NAME)


def test_its_parts_run_with_their_settings_in_their_sections(whole: Path) -> None:
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["accuracy"] > 0.5
    assert records[0]["mean_rounds"] == 1
    parameters = json.loads((whole / "summary.json").read_text())["parameters"]
    assert parameters == 5 * 12 + 12 + 12 * 3 + 3
    # In half precision; and one float32 that the method sends beside the model.
    assert all(record["bytes_up"] == len(record["clients"]) * (2 * parameters + 4) for record in records)
    told = json.loads((whole / "told.json").read_text())
    assert told[0] == ["begin", 0]
    assert [line[1] for line in told if line[0] == "round"] == [1, 2, 3, 4]
    assert [line[1] for line in told if line[0] == "client"] == [c for record in records for c in record["clients"]]


def test_named_by_their_place_with_two_workers_they_give_the_same_bits(whole: Path, tmp_path: Path) -> None:
    assert bits(run(tmp_path / "r", BY_PLACE, workers=2)) == bits(whole)


def test_resumed_they_give_the_same_bits_and_the_callback_knows_the_rounds_before(whole: Path, tmp_path: Path) -> None:
    half = run(tmp_path / "r", BY_NAME, rounds=2)
    config = half / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    dynafed("resume", str(half))
    assert bits(half) == bits(whole)
    assert json.loads((half / "told.json").read_text())[0] == ["begin", 2]


def test_on_the_other_backend_they_give_the_same_bits(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    half = run(tmp_path / "r", BY_NAME, rounds=2, engine="flower")
    config = half / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    dynafed("resume", str(half))
    assert bits(half) == bits(whole)


def test_it_is_listed() -> None:
    methods = {row["name"]: row for row in json.loads(dynafed("methods", "--json"))["items"]}
    assert methods["pull"]["settings"][0]["name"] == "strength"
    assert "clouds" in [row["name"] for row in json.loads(dynafed("datasets", "--json"))["items"]]


class One:
    pass


def test_a_registry_imports_when_asked_and_says_what_it_doesn_t_know() -> None:
    registry: Registry[Any] = Registry("gadget", {"list": "builtins:list", "broken": "nowhere.at.all:X"})
    assert registry.names() == ["list", "broken"]
    assert registry.load("list") is list
    assert registry.load("collections:OrderedDict").__name__ == "OrderedDict"
    with pytest.raises(UserError, match="unknown gadget 'lists': did you mean 'list'"):
        registry.check("lists")
    with pytest.raises(UserError, match="gadget = 'broken' can't be imported: No module named 'nowhere'"):
        registry.load("broken")
    registry.add("one", One)
    registry.add("one", One)
    assert registry.load("one") is One
    with pytest.raises(UserError, match="two gadgets are called 'one'"):
        registry.add("one", Path)
    registry.remove("one")
    assert "one" not in registry


CODE = "import sys; sys.path.pop(0); from dynafed.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("start", [["-c", CODE], ["-m", "dynafed"]], ids=["dynafed", "python -m"])
def test_a_file_in_the_current_folder_is_imported_only_if_it_is_asked_for(tmp_path: Path, start: list[str]) -> None:
    (tmp_path / "secrets.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "mine.py").write_text("from torch import nn\ndef net(shape, classes): return nn.Linear(5, classes)\n")
    environment = os.environ | {"PYTHONPATH": str(OUTSIDE)}
    flags = ["-s", "dataset=clouds", "-s", "clients=3", "-s", "rounds=1", "-s", "model=mine:net", "-s", "workers=1"]
    (tmp_path / "empty.toml").touch()
    done = subprocess.run(
        [sys.executable, *start, "run", "empty.toml", "--out", "r", *flags],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "it ran" not in done.stderr


def test_a_script_may_name_a_class_of_its_own(tmp_path: Path) -> None:
    """Then the class is defined twice: in the program, and in the module that the config names."""
    (tmp_path / "script.py").write_text(
        "import dynafed\n"
        "class Mine(dynafed.Method):\n    name = 'mine'\n"
        "if __name__ == '__main__':\n"
        "    config = dynafed.Config.load('demo', {'method': 'fedavg+script:Mine', 'rounds': 1, 'workers': 1})\n"
        "    print(dynafed.run(config, out='r').final_accuracy)\n"
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

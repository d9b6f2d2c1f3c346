"""Whatever is changed in a run's folder is noticed: by `dynafed verify`, and by a resume if it reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import TEST, TRAIN, run_tiny

import dynafed
from dynafed import UserError, tree
from dynafed.cli import main
from dynafed.engine.checkpoint import changed_keys
from dynafed.engine.verify import find_changes
from dynafed.synthesis.figures import SynthesisFigures
from dynafed.synthesis.synthetic import SyntheticData

DATA: dict[str, Any] = {"train": TRAIN, "test": TEST}
SYNTHESIS = {"dynafed.trajectory": 4, "dynafed.segment": 2, "dynafed.iterations": 3, "dynafed.samples": 4}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("done") / "r"
    run_tiny(path, method="scaffold+dynafed", **SYNTHESIS)
    return path


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    shutil.copytree(done, tmp_path / "r")
    return tmp_path / "r"


def flip(file: Path, at: float = 0.6) -> None:
    """Flip one bit."""
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 1
    file.write_bytes(content)


def edit(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))


def test_a_run_that_nobody_touched_is_whole(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(copy)]) == 0
    assert capsys.readouterr().out == f"{copy} is whole\n"
    assert main(["report", str(copy)]) == 0
    assert find_changes(copy) == []
    resumed = dynafed.resume(copy, changes={"rounds": 8, "workers": 2}, **DATA)
    assert len(resumed.history) == 8
    assert find_changes(copy) == []


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "metrics": (lambda path: edit(path / "metrics.jsonl", '"round": 3', '"round":  3'), "metrics.jsonl was changed"),
    "accuracy": (lambda path: edit(path / "metrics.jsonl", '"accuracy": 0.', '"accuracy": 0.9'), "from line 1 on"),
    "summary": (lambda path: edit(path / "summary.json", '"best": 0.', '"best": 0.9'), "summary.json was changed"),
    "lr": (lambda path: edit(path / "config.toml", "lr = 0.001", "lr = 0.1"), "lr is 0.1, and the checkpoint was made"),
    "D_syn": (lambda path: flip(path / "synthetic.safetensors", 0.9), "synthetic.safetensors was changed"),
    "partition": (lambda path: flip(path / "partition.json"), "partition.json was changed"),
    "missing": (lambda path: (path / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
    "checkpoint": (lambda path: flip(path / "checkpoint/round-000006/state.safetensors"), "round-000006 is damaged"),
    "client": (lambda path: flip(next((path / "clients").glob("*/*"))), "is missing or was changed"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_touched_is_named(name: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, words = CHANGES[name]
    change(copy)
    assert main(["verify", str(copy)]) == 2
    printed = capsys.readouterr()
    assert words in printed.out
    assert f"{copy} is not as it was written" in printed.err
    assert main(["verify", str(copy), "--json"]) == 2
    assert not json.loads(capsys.readouterr().out)["whole"]


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("lr = 0.001", "lr = 0.1", "lr"),
        ('optimizer = "adam"', 'optimizer = "sgd"', "optimizer"),
        ('"scaffold+dynafed"', '"fedavg+dynafed"', "method"),
        ("finetune_steps = ", "finetune_steps = 1", "dynafed.finetune_steps"),
    ],
)
def test_an_edited_config_is_not_resumed(before: str, after: str, key: str, copy: Path) -> None:
    edit(copy / "config.toml", before, after)
    edit(copy / "config.toml", "rounds = 6", "rounds = 8")
    with pytest.raises(UserError, match=f"config.toml: {key} is .*and the checkpoint was made with"):
        dynafed.resume(copy, **DATA)


def test_keys_of_a_later_version_are_no_change() -> None:
    before = {"lr": 0.1, "dynafed": {"samples": 10}}
    assert changed_keys(before, {"lr": 0.1, "dynafed": {"samples": 10, "new": 1}, "new": 2}) == []
    assert changed_keys(before, {"lr": 0.1, "dynafed": {"samples": 11}}) == [
        "dynafed.samples is 11, and the checkpoint was made with 10"
    ]
    assert changed_keys(before, {"lr": 0.1}) == ["dynafed is None, and the checkpoint was made with {'samples': 10}"]


def test_another_run_s_checkpoint_or_metrics_are_not_resumed(copy: Path, tmp_path: Path) -> None:
    run_tiny(tmp_path / "other", method="scaffold+dynafed", seed=1, **SYNTHESIS)
    shutil.copy(tmp_path / "other" / "metrics.jsonl", copy / "metrics.jsonl")
    with pytest.raises(UserError, match="jsonl was changed since the checkpoint"):
        dynafed.resume(copy, changes={"rounds": 8}, **DATA)
    for part in ("checkpoint", "clients"):
        shutil.rmtree(copy / part)
        shutil.copytree(tmp_path / "other" / part, copy / part)
    with pytest.raises(UserError, match="was run with other data, another split"):
        dynafed.resume(copy, changes={"rounds": 8}, **DATA)


@pytest.mark.parametrize(
    "line", ['{"sound": 3}', '{"round": "3"}', "[3]", "3", "[" * 9999, '{"round": ' + "9" * 9999 + "}"]
)
def test_a_line_of_the_metrics_that_is_no_round_is_refused_in_one_line(line: str, copy: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n")
    with pytest.raises(UserError, match=r"^[^\n]*metrics.jsonl lacks rounds[^\n]*$"):
        dynafed.resume(copy, changes={"rounds": 8}, train=TRAIN, test=TEST)
    assert find_changes(copy)


def test_a_checkpoint_that_was_replaced_by_rerun_rounds_fits_the_metrics(copy: Path) -> None:
    """A client's state is lost, so the rounds since the checkpoint before are run again, with other times."""
    whole = dynafed.resume(copy, **DATA).state.model
    newest = json.loads(json.loads((copy / "checkpoint/round-000006/state.json").read_text())["state"])
    client, (made, _) = next(iter((c, m) for c, m in newest["clients"].items() if m[0] > 4))
    (copy / "clients" / f"{int(client) % 256:02x}" / f"{client}-{made}.safetensors").unlink()
    dynafed.resume(copy, **DATA)
    assert find_changes(copy) == []
    assert tree.digest(dynafed.resume(copy, **DATA).state.model) == tree.digest(whole)


def test_sealed_files_notice_every_bit(tmp_path: Path) -> None:
    content = tree.seal({"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.int64)}, {"task": "this"})
    assert tree.unseal(content)[1] == {"task": "this"}
    noticed = 0
    for bit in range(0, 8 * len(content), 5):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found, notes = tree.unseal(bytes(damaged))
        except Exception:
            noticed += 1
        else:  # the name of the checksum itself
            assert (tree.digest(found), notes["task"]) == (tree.digest(tree.unseal(content)[0]), "this")
    assert noticed > 0.9 * len(content) * 8 / 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(0, 6)}, "holds no samples"),
        ({"x": torch.zeros(4, 6, dtype=torch.float64)}, "not float32"),
        ({"x": torch.zeros(4, 6, dtype=torch.complex64)}, "not float32"),
        ({"x": torch.full((4, 6), 1e38)}, "numbers beyond"),
        ({"inner_lr": torch.tensor(-1.0)}, "must be positive"),
        ({"inner_lr": torch.zeros(3)}, "is no synthetic set"),
        ({"logits": torch.zeros(())}, "holds no samples"),
    ],
)
def test_odd_synthetic_sets_are_refused_in_one_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    parts = {"x": torch.zeros(4, 6), "logits": torch.zeros(4, 4), "inner_lr": torch.tensor(0.1)}
    (tmp_path / "s").write_bytes(tree.pack(parts | changes))
    with pytest.raises(UserError, match=words):
        SyntheticData.load(tmp_path / "s", (6,), 4)


def test_a_torn_synthesis_log_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / "synthesis.jsonl").write_bytes(b'{"1": 0.5}\n[3]\n{"2": 0.9\xff')
    assert SynthesisFigures(tmp_path, 5).losses == {1: 0.5}

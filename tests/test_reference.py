"""Every config key is told of: on the command line, in docs/config.md, and in errors' suggestions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dynafed.cli import main
from dynafed.config import Config, installed_sections
from dynafed.reference import config_reference, to_markdown
from dynafed.settings import alike

PAGE = Path(__file__).parents[1] / "docs" / "config.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == to_markdown(config_reference(builtin=True)), "run: make config-docs"


def test_every_key_has_its_row() -> None:
    found = {one["section"]: [key["name"] for key in one["keys"]] for one in config_reference()}
    assert found.pop("") == [field.name for field in dataclasses.fields(Config) if field.name != "sections"]
    assert found == {name: [f.name for f in dataclasses.fields(group)] for name, group in installed_sections().items()}


def test_it_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["config", "dynafed", "--json"]) == 0
    (section,) = json.loads(capsys.readouterr().out)["items"]
    keys = {key["name"]: key for key in section["keys"]}
    assert section["parts"] == ["method dynafed"]
    assert keys["trajectory"] | {"help": ""} == {
        "name": "trajectory",
        "type": "int",
        "default": 20,
        "range": ">= 2",
        "choices": [],
        "execution": False,
        "help": "",
    }
    assert keys["distance"]["choices"] == ["quotient", "l2", "cosine"]
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["config"]) == 0
    text = capsys.readouterr().out
    assert "alpha = 0.1" in text
    assert "float, > 0" in text
    assert "[early-stopping]  for callback early-stopping" in text
    assert "may change when a run is resumed" in text
    assert main(["config", "mlpp"]) == 2
    assert "unknown section 'mlpp': did you mean 'mlp'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "known", "meant"),
    [
        ("aplha", ["alpha", "lr"], "alpha"),
        ("FedAvg", ["fedavg", "fedavgm"], "fedavg"),
        ("epochs", ["local_epochs", "rounds"], "local_epochs"),
        ("batch", ["watch", "batch_size"], "batch_size"),
        ("fedsgd", ["feddf", "fedavg", "feddyn"], None),
        ("gamma", ["alpha", "dataset"], None),
        ("sgd", ["seed", "schedule"], None),
    ],
)
def test_only_names_that_are_alike_are_suggested(typed: str, known: list[str], meant: str | None) -> None:
    assert alike(typed, known) == meant


def test_the_section_of_a_key_does_not_make_it_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-s", "method=dynafed", "-s", "dynafed.foo=1"]) == 2
    error = capsys.readouterr().err
    assert "did you mean" not in error
    assert "known: augment" in error
    assert main(["run", "-s", "method=dynafed", "-s", "dynafed.sample=1"]) == 2
    assert "did you mean 'dynafed.samples'?" in capsys.readouterr().err
    assert main(["run", "-s", "optimizer=lion"]) == 2
    assert capsys.readouterr().err == "dynafed: optimizer = 'lion' is not one of sgd, momentum, adam, adamw\n"

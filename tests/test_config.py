from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from dynafed import Config, UserError
from dynafed.config import parse_override, presets
from dynafed.synthesis import DynaFedSettings


def test_defaults_are_valid_and_survive_toml() -> None:
    config = Config.load()
    assert Config.from_dict(tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_and_says_what_it_is(name: str) -> None:
    assert presets()[name]
    Config.load(name)


def test_presets_of_the_paper_and_of_its_code_keep_its_distance_and_a_single_rate() -> None:
    chosen = {name: Config.load(name).section("dynafed", DynaFedSettings) for name in presets()}
    for name, settings in chosen.items():
        theirs = name.startswith(("paper-", "official-"))
        assert (settings.distance, settings.rates_per_tensor) == (("l2", False) if theirs else ("quotient", True))


def test_required_keys_exist_at_the_top_level() -> None:
    names = (
        "method dataset model partition alpha clients participation rounds local_epochs batch_size optimizer lr seed"
    )
    assert set(names.split()) <= set(Config.load().to_dict())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aplha": 1}, "did you mean 'alpha'"),
        ({"mlp.widht": 1}, "did you mean 'mlp.width'"),
        ({"mlpp.width": 1}, "did you mean 'mlp'"),
        ({"alpha": 0}, "more than 0"),
        ({"alpha": "much"}, "must be a number"),
        ({"alpha": float("nan")}, "must be finite"),
        ({"rounds": 0}, "at least 1"),
        ({"rounds": 1.5}, "must be a whole number"),
        ({"rounds": True}, "must be a whole number"),
        ({"participation": 1.5}, "at most 1"),
        ({"optimizer": "adamm"}, "did you mean 'adam'"),
        ({"partition": "dirichelt"}, "did you mean 'dirichlet'"),
        ({"method": "fedavgg"}, "did you mean 'fedavg'"),
        ({"method": "fedavg+fedavg"}, "twice"),
        ({"dataset": "cifar11"}, "did you mean 'cifar10'"),
        ({"model": "convnett"}, "did you mean 'convnet'"),
        ({"clients": 4, "clients_per_round": 5}, "more than clients"),
        ({"clients": 4, "participation": 0.5, "min_survivors": 3}, "min_survivors"),
        ({"evaluate": "validation"}, "validation_samples"),
        ({"sections": 1}, "a table of its own"),
        ({"alpha": 10**400}, "too large"),
        ({"schedule": "exponential", "lr_decay": 1.5}, "at most 1"),
        ({"alpha": 1, "alpha.x": 1}, "is a key, not a section"),
    ],
)
def test_mistakes_are_refused_with_the_way_out(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Config.load(None, changes)


def test_files_extend_presets_and_overrides_come_last(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('extends = "demo"\nalpha = 0.5\n[mlp]\nwidth = 32\n')
    config = Config.load(file, {"mlp": {"depth": 1}, "seed": 3})
    assert (config.alpha, config.seed, config.dataset) == (0.5, 3, "fmnist-mini")
    assert config.to_dict()["mlp"] == {"width": 32, "depth": 1}


def test_files_that_extend_nonsense_are_refused(tmp_path: Path) -> None:
    for text, words in (
        ("extends = 3", "must be the name"),
        ('extends = "mine.toml"', "extends itself"),
        ('extends = "demo"\n[alpha]\nx = 1', "is a key, not a section"),
    ):
        (tmp_path / "mine.toml").write_text(text)
        with pytest.raises(UserError, match=words):
            Config.load(tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="can't be read"):
        Config.load(tmp_path / "mine.toml")
    (tmp_path / "base.toml").write_text("alpha = 0.25")
    (tmp_path / "mine.toml").write_text('extends = "base.toml"')
    assert Config.load(tmp_path / "mine.toml").alpha == 0.25


def test_numpy_numbers_are_numbers() -> None:
    assert Config.load(None, {"alpha": np.float64(0.5), "rounds": np.int64(3)}).rounds == 3


def test_unknown_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("alpha = = 1")
    with pytest.raises(UserError, match="did you mean 'demo'"):
        Config.load("demoo")
    with pytest.raises(UserError, match="no such file"):
        Config.load("absent.toml")
    with pytest.raises(UserError, match="not valid TOML"):
        Config.load(tmp_path / "broken.toml")


def test_overrides_are_toml_values_or_bare_words() -> None:
    assert parse_override("alpha=0.01") == ("alpha", 0.01)
    assert parse_override("mlp.width=64") == ("mlp.width", 64)
    assert parse_override("method=fedavg") == ("method", "fedavg")
    assert parse_override("x=[1, 2]") == ("x", [1, 2])
    with pytest.raises(UserError, match="key=value"):
        parse_override("alpha")


def test_schedules() -> None:
    def rates(**changes: object) -> list[float]:
        config = Config.load(None, {"lr": 0.8, "rounds": 4, **changes})
        return [config.lr_at(round_num) for round_num in (1, 2, 3)]

    assert rates() == [0.8, 0.8, 0.8]
    assert rates(schedule="exponential", lr_decay=0.5) == [0.8, 0.4, 0.2]
    assert rates(schedule="inverse", lr_decay=1.0) == pytest.approx([0.8, 0.4, 0.8 / 3])
    assert rates(schedule="cosine")[2] == pytest.approx(0.4)


def test_a_share_or_a_number_of_clients() -> None:
    assert Config.load(None, {"clients": 80, "participation": 0.4}).sampled == 32
    assert Config.load(None, {"clients": 3, "participation": 0.01}).sampled == 1
    assert Config.load(None, {"clients": 80, "clients_per_round": 7}).sampled == 7

from __future__ import annotations

import pytest
import torch
from torch import nn

from dynafed import Config, UserError, models


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("convnet", (3, 32, 32), 10, 320_010),
        ("convnet", (3, 32, 32), 100, 504_420),
        ("convnet", (1, 28, 28), 10, 317_706),
        ("mlp", (1, 28, 28), 10, 118_282),
        ("resnet8", (3, 32, 32), 10, 78_042),
        ("resnet18", (3, 32, 32), 10, 11_173_962),
    ],
)
def test_parameter_counts_of_the_paper_s_models(name: str, shape: tuple[int, ...], classes: int, count: int) -> None:
    model = models.build(Config.load(None, {"model": name}), shape, classes)
    assert parameters(model) == count
    with torch.no_grad():
        assert model(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize("norm", models.NORMS)
def test_norms_depth_and_width(norm: str) -> None:
    config = Config.load(None, {"model": "convnet", "convnet.norm": norm, "convnet.width": 16, "convnet.depth": 2})
    assert models.build(config, (1, 8, 8), 3)(torch.zeros(2, 1, 8, 8)).shape == (2, 3)


def test_tabular_rows() -> None:
    assert models.build(Config.load(None, {"mlp.depth": 0}), (5,), 3)(torch.zeros(2, 5)).shape == (2, 3)


def two_arguments(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(shape[0], classes)


def no_arguments() -> nn.Module:
    return nn.Linear(5, 3)


def not_a_module() -> int:
    return 3


def test_one_s_own_factory() -> None:
    config = Config.load()
    assert isinstance(models.build(config, (5,), 3, two_arguments), nn.Linear)
    assert isinstance(models.build(config, (5,), 3, no_arguments), nn.Linear)
    by_name = Config.load(None, {"model": "collections:OrderedDict"})
    with pytest.raises(UserError, match=r"not a torch\.nn\.Module"):
        models.build(by_name, (5,), 3)
    with pytest.raises(UserError, match="returned int"):
        models.build(config, (5,), 3, not_a_module)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "shape", "words"),
    [
        ({"model": "nowhere.at_all:f"}, (5,), "can't be imported"),
        ({"model": "math:nothing"}, (5,), "can't be imported"),
        ({"model": ":"}, (5,), "can't be imported"),
        ({"model": ".x:y"}, (5,), "can't be imported"),
        ({"model": "math:pi"}, (5,), "must be a function"),
        ({"model": "convnet"}, (5,), "try model = mlp"),
        ({"model": "convnet"}, (1, 4, 4), "to nothing"),
        ({"model": "resnet8", "resnet.width": 9}, (1, 8, 8), "eight divides"),
    ],
)
def test_what_can_t_be_built_says_why(values: dict[str, object], shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        models.build(Config.load(None, values), shape, 3)

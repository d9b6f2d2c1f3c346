"""Grids: what is finished is skipped, what others hold is left alone, what two methods share is computed once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dynafed import Callback, Config, UserError, run
from dynafed.engine.checkpoint import read_parts
from dynafed.engine.files import lock_folder, make_folder
from dynafed.engine.grid import Cell, config_digest, run_cells
from dynafed.engine.sharing import SHARED, begins_alike, start_from
from dynafed.engine.summary import read_metrics
from dynafed.errors import FolderBusy

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "clients": 6,
    "participation": 0.5,
    "rounds": 8,
    "workers": 1,
    "checkpoint_every": 3,
    "mlp.width": 8,
    "average.window": 6,
    "dynafed.trajectory": 5,
    "dynafed.segment": 2,
    "dynafed.iterations": 4,
    "dynafed.inner_steps": 3,
    "dynafed.samples": 20,
}


def small(**changes: Any) -> Config:
    return Config.load(None, SMALL | {key.replace("__", "."): value for key, value in changes.items()})


def cells_of(folder: Path, *methods: str, **changes: Any) -> list[Cell]:
    return [Cell(method, small(method=method, **changes), folder / method) for method in methods]


def test_a_cell_that_is_held_is_skipped_and_looked_at_again_at_the_end(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, "fedavg", "fedprox", rounds=1)
    with lock_folder(make_folder(cells[0].path), name=".cell"):
        outcomes = list(run_cells(cells))
    assert [cell.title for cell, _ in outcomes] == ["fedprox", "fedavg"]
    assert isinstance(outcomes[1][1], FolderBusy)
    held = lock_folder(make_folder(cells[0].path), name=".cell")
    held.__enter__()
    seen = []
    for cell, outcome in run_cells(cells):
        seen.append(cell.title)
        assert isinstance(outcome, dict)
        if cell.title == "fedprox":
            held.__exit__(None, None, None)
    assert seen == ["fedprox", "fedavg"]


def test_an_error_ends_the_grid_unless_it_goes_on(tmp_path: Path) -> None:
    cells = [
        Cell("missing", small(dataset="mnist", data_dir=str(tmp_path)), tmp_path / "a"),
        *cells_of(tmp_path, "fedavg", rounds=1),
    ]
    with pytest.raises(UserError, match="mnist was not found"):
        list(run_cells(cells))
    (_, failed), (_, done) = run_cells(cells, keep_going=True)
    assert isinstance(failed, UserError)
    assert isinstance(done, dict)


def test_the_digest_is_that_of_what_decides_the_result() -> None:
    assert config_digest(small()) == config_digest(small(workers=2, fedprox__mu=3))
    assert config_digest(small()) != config_digest(small(alpha=0.3))


@pytest.mark.parametrize("method", ["dynafed", "dynafed+average"])
def test_dynafed_goes_on_from_the_first_rounds_of_fedavg_with_the_same_bits(tmp_path: Path, method: str) -> None:
    alone = run(small(method=method), out=tmp_path / "alone")
    begun: dict[str, int] = {}

    class Follow(Callback):
        def on_run_begin(self, run: Any) -> None:
            begun[run.config.method] = run.round

    list(run_cells(cells_of(tmp_path, "fedavg+average", method), lambda title: [Follow()]))
    assert begun == {"fedavg+average": 0, method: 4}
    assert [folder.name for folder in (tmp_path / "fedavg+average" / SHARED).iterdir()] == ["round-000006"]
    one, other = (read_parts(folder / "checkpoint" / "round-000008") for folder in (alone.path, tmp_path / method))
    assert one.keys() == other.keys()
    for part in one:
        assert one[part].keys() == other[part].keys()
        assert all(torch.equal(one[part][name], other[part][name]) for name in one[part])
    assert without_times(alone.path) == without_times(tmp_path / method)


def without_times(path: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if not key.startswith("seconds")} for record in read_metrics(path)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "fedprox+dynafed"},
        {"lr": 0.5},
        {"seed": 1},
        {"dynafed__trajectory": 8},
        {"client_state": "persistent"},
        {"method": "dynafed+average", "average__window": 3},
    ],
)
def test_others_dont_begin_alike(changes: dict[str, Any]) -> None:
    source = small(method="fedavg+average")
    assert begins_alike(small(method="dynafed"), source)
    assert not begins_alike(small(**({"method": "dynafed"} | changes)), source)


def test_without_the_models_of_all_rounds_it_begins_at_round_1(tmp_path: Path) -> None:
    source, target = cells_of(tmp_path, "fedavg+average", "dynafed")
    run(source.config, out=source.path)
    assert not start_from(target.config, target.path, source.path)
    shutil.copytree(source.path / "checkpoint", source.path / SHARED)  # rounds 6 and 8: the newest has lost two
    assert not start_from(target.config, target.path, source.path)
    assert not target.path.exists()
    shutil.rmtree(source.path / SHARED / "round-000008")
    assert start_from(target.config, target.path, source.path)

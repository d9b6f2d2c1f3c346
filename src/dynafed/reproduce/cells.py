"""The cells of a table or figure: which runs it needs, which folders they have, and whether their data are here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dynafed.config import Config
from dynafed.data.loading import find
from dynafed.data.spec import get_spec
from dynafed.engine.grid import Cell, config_digest
from dynafed.engine.trust import load_run_config
from dynafed.errors import UserError
from dynafed.report.load import find_runs
from dynafed.reproduce.paper import Column, Experiment
from dynafed.reproduce.scales import base_method, cell_config, scaled


@dataclass(frozen=True)
class PlannedCell:
    """A run that a table or figure needs."""

    column: Column
    method: str
    """Without the mean of the last models, which is evaluated beside it."""
    cell: Cell
    missing: str = ""
    """Why it can't run here; empty if it can."""

    @cached_property
    def digest(self) -> str:
        """Of what decides its result."""
        return config_digest(self.cell.config)

    @cached_property
    def scaled(self) -> dict[str, tuple[Any, Any]]:
        """Where it differs from the paper's text: our value and the paper's, by key."""
        return scaled(self.cell.config, self.column.settings, self.method)


def plan(
    experiment: Experiment,
    out: Path,
    *,
    scale: str = "cpu",
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    only: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    execution: Mapping[str, Any] | None = None,
) -> list[PlannedCell]:
    """The cells of an experiment, each in a folder below `out`.

    A run that is anywhere in `out` already, under whatever name, is a cell's if its config decides the same result.
    """
    changes = {**(overrides or {}), **(execution or {})}
    wanted = [
        (column, method, cell_config(column.settings, method, seed, scale, changes))
        for seed in seeds
        for column in _chosen(experiment, only)
        for method in methods or experiment.methods
    ]
    known = _known_runs(out, trust=wanted[0][2])
    return [
        PlannedCell(
            column,
            base_method(method),
            _with_folder(f"{column.name}, {method}, seed {config.seed}", config, out, known),
            missing_data(config, sample_will_do=scale == "smoke"),
        )
        for column, method, config in wanted
    ]


def to_run(planned: Sequence[PlannedCell]) -> list[Cell]:
    """The cells that can run here, each folder once."""
    return list({one.cell.path: one.cell for one in planned if not one.missing}.values())


def missing_data(config: Config, sample_will_do: bool) -> str:
    """Why a config's dataset can't be used; empty if it can, or if nobody knows before it is loaded."""
    spec = get_spec(config.dataset)
    if spec is None:
        return ""
    present = find(spec, config.data_folder())
    if present is None:
        return f"{config.dataset} was not found: dynafed data fetch {config.dataset}, or --data-dir"
    if present[1].suffix and not sample_will_do:
        return f"of {config.dataset}, only this is here: {present[1].title}"
    return ""


def _chosen(experiment: Experiment, only: Sequence[str]) -> list[Column]:
    """The columns that have all words of one of the texts in `only`."""

    def words(text: str) -> set[str]:
        return set(re.split(r"[\s,=]+", text.strip().lower()))

    columns = [
        column
        for column in experiment.columns
        if not only or any(words(text) <= words(f"{column.name} {_values(column)}") for text in only)
    ]
    if not columns:
        names = "; ".join(column.name for column in experiment.columns)
        raise UserError(f"--only {' '.join(only)} names no part of {experiment.name}: {names}")
    return columns


def _values(column: Column) -> str:
    return " ".join(str(value) for value in column.settings.values())


def _with_folder(title: str, config: Config, out: Path, known: Mapping[str, tuple[Path, str]]) -> Cell:
    """The cell in the folder that holds its run already, else in one named after its config.

    A run without the mean of the last models will do, too: the model's own accuracy is the same.
    """
    for choice in (config, config.replace(method=base_method(config.method))) if known else ():
        if (digest := config_digest(choice)) in known:
            path, method = known[digest]
            return Cell(title, choice.replace(method=method), path)
    parts = (
        *(config.dataset, config.model, f"alpha{config.alpha:g}", base_method(config.method), f"seed{config.seed}"),
        config_digest(config)[:8],
    )
    return Cell(title, config, out / "runs" / re.sub(r"[:/]", "_", "-".join(parts)))


def _known_runs(out: Path, trust: Config) -> dict[str, tuple[Path, str]]:
    """The runs in a folder by the digest of their configs, finished ones first; each with its method as it is named.

    Nothing is imported that `trust` doesn't name, too.
    """
    try:
        folders = find_runs([out])
    except UserError:
        return {}
    known: dict[str, tuple[Path, str]] = {}
    for folder in sorted(folders, key=lambda folder: not (folder / "summary.json").exists()):
        try:
            config = load_run_config(folder, trust)
        except UserError:  # of another version, or of parts that aren't installed or trusted
            continue
        known.setdefault(config_digest(config), (folder, config.method))
    return known

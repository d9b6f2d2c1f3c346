"""Reading the config of a run's folder, which may come from anybody, without running anything that it names."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dynafed.config import Config, parse_toml
from dynafed.engine.files import check_links
from dynafed.errors import UserError

PARTS = ("method", "model", "loss", "dataset", "partition", "engine", "callbacks", "update_transforms")
"""Keys that name parts, which are imported if the name is a place such as package.module:Name."""


def load_run_config(folder: Path, trust: bool | Config = False) -> Config:
    """The config of a run's folder.

    Refused if it names parts by their place in a module, unless `trust` is True, or is a config that names them, too.
    """
    check_links(folder)
    file = folder / "config.toml"
    if not file.is_file():
        raise UserError(f"{folder} holds no run: it has no config.toml")
    values = parse_toml(file.read_bytes(), file)
    check_places(values, file, trust)
    return Config.from_dict({"kernels_version": 1} | values)  # which is what runs had before they wrote it down


def check_places(values: Mapping[str, Any], file: Path, trust: bool | Config = False) -> None:
    """Refuse what `file` says about a run's parts if these would be imported unasked."""
    known = set(imported_places(trust.to_dict())) if isinstance(trust, Config) else set()
    unknown = [place for place in imported_places(values) if place not in known]
    if unknown and trust is not True:
        raise UserError(
            f"{file} would import and run {', '.join(unknown)}: "
            "if you trust whoever made it, add --trust (in Python: trust=True)"
        )


def resume_command(folder: Path) -> str:
    """What to type to continue the run in a folder."""
    try:
        places = imported_places(parse_toml((folder / "config.toml").read_bytes(), folder))
    except (OSError, UserError):
        places = []
    return f"dynafed resume {shlex.quote(str(folder))}{' --trust' if places else ''}"


def imported_places(values: Mapping[str, Any]) -> list[str]:
    """The places in modules that a config's parts would be imported from, each once."""
    return sorted({name for key in PARTS for name in _names(values.get(key)) if _is_place(name)})


def _names(value: Any) -> Iterator[str]:
    for text in value if isinstance(value, list | tuple) else [value]:
        yield from (part.strip() for part in text.split("+")) if isinstance(text, str) else ()


def _is_place(name: str) -> bool:
    return ":" in name and not name.startswith("hf:")

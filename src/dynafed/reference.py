"""Every key of a config, for `dynafed config` and docs/config.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dynafed.callbacks import CALLBACKS
from dynafed.config import Config, engine_sections
from dynafed.errors import UserError
from dynafed.methods import METHODS
from dynafed.models import MODELS
from dynafed.settings import describe, nearest
from dynafed.transforms import TRANSFORMS

HEADER = """# Config keys

Every key of a config: in a TOML file, as `-s KEY=VALUE` on the command line, in `Config.load(None, {"KEY": VALUE})`.
`dynafed config` prints this page, `dynafed config dynafed` one section of it. A key of a section is written
`section.key`, such as `-s mlp.width=64`, or in TOML under `[section]`.

This page is written by `make config-docs`.
"""


def config_reference(section: str | None = None, *, builtin: bool = False) -> list[dict[str, Any]]:
    """The sections of a config, each with the parts that read it and its keys; the common keys have section "".

    With `section`, only that one; `builtin` leaves out the parts of other packages.
    """
    found: dict[str, dict[str, Any]] = {"": {"section": "", "parts": [], "keys": describe(Config)}}
    for registry in (MODELS, METHODS, TRANSFORMS, CALLBACKS):
        for name in sorted(registry.names()):
            part: Any = registry.load(name)
            group = getattr(part, "Settings", None)
            if group is None or (builtin and not group.__module__.startswith("dynafed.")):
                continue
            key = getattr(part, "section", None) or part.name
            found.setdefault(key, {"section": key, "parts": [], "keys": describe(group)})
            found[key]["parts"].append(f"{registry.kind} {name}")
    for key, group in engine_sections().items():
        found[key] = {"section": key, "parts": ["the engine, if the config has this section"], "keys": describe(group)}
    if section is None:
        return list(found.values())
    if section not in found:
        raise UserError(f"unknown section '{section}': {nearest(section, filter(None, found))}")
    return [found[section]]


def allowed(key: Mapping[str, Any]) -> str:
    """The values that a key may have, in words."""
    return f"one of {', '.join(key['choices'])}" if key["choices"] else key["range"]


def default(key: Mapping[str, Any]) -> str:
    """A key's default as TOML writes it."""
    return json.dumps(key["default"])


def to_markdown(sections: list[dict[str, Any]]) -> str:
    """The reference as a Markdown page."""
    pages = [HEADER]
    for one in sections:
        title = f"## [{one['section']}]\n\nFor {', '.join(one['parts'])}." if one["section"] else "## Common keys"
        note = "Those marked * decide how a run is executed, not what it computes, and may change when it is resumed."
        rows = [
            f"| `{key['name']}`{' *' if key['execution'] else ''} | {key['type']} | `{default(key)}` | {allowed(key)} "
            f"| {key['help'].replace('|', chr(92) + '|')} |"
            for key in one["keys"]
        ]
        table = "\n".join(["| key | type | default | allowed | |", "|---|---|---|---|---|", *rows])
        pages.append("\n\n".join([title, *([] if one["section"] else [note]), table]) + "\n")
    return "\n".join(pages)

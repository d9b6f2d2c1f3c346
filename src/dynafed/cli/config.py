"""`dynafed config`: every key, with its type, default, allowed values and help."""

from __future__ import annotations

import argparse
import json
import textwrap

from dynafed.cli.common import Commands, add_command, out


def register(commands: Commands) -> None:
    """Add the command."""
    keys = add_command(commands, "config", _config, "Print every config key: type, default, allowed values, help.")
    keys.add_argument("section", nargs="?", metavar="SECTION", help="only this section, such as dynafed or mlp")
    form = keys.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true")
    form.add_argument("--markdown", action="store_true", help="as the page docs/config.md")


def _config(args: argparse.Namespace) -> None:
    from dynafed.reference import allowed, config_reference, default, to_markdown

    sections = config_reference(args.section, builtin=args.markdown)
    if args.json:
        print(json.dumps({"items": sections}))
        return
    if args.markdown:
        print(to_markdown(sections), end="")
        return
    width = min(out.width, 100)
    for one in sections:
        if one["section"]:
            out.print(f"\n[{one['section']}]  for {', '.join(one['parts'])}", style="bold", highlight=False)
        for key in one["keys"]:
            head = f"{key['name']} = {default(key)}"
            kind = f"{key['type']}{', ' if allowed(key) else ''}{allowed(key)}"
            if len(head) + 4 + len(kind) > width:
                kind = key["type"] + "".join(f"\n    {line}" for line in textwrap.wrap(allowed(key), width - 4))
            out.print(f"{head:<36}  {kind}", highlight=False)
            about = key["help"] + ("; may change when a run is resumed" if key["execution"] else "")
            lines = textwrap.wrap(about, width, initial_indent="    ", subsequent_indent="    ")
            out.print("\n".join(lines), style="dim", highlight=False)

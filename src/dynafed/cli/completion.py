"""Shell completion: `dynafed completion bash` prints a script, which asks `dynafed complete` for the words.

Nothing is imported for it but what `dynafed --help` needs; keys of a section (`-s dynafed.`) need torch, and a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path

from dynafed.cli.common import Commands, add_command

SCRIPTS = {
    "bash": """\
# In ~/.bashrc: eval "$(dynafed completion bash)"
_dynafed() {
    local IFS=$'\\n' word="${COMP_WORDS[COMP_CWORD]}"
    COMPREPLY=($(dynafed complete -- "${COMP_WORDS[@]:1:COMP_CWORD-1}" "$word" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -gt 0 ]] || COMPREPLY=($(compgen -f -- "$word"))
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=/}
complete -o filenames -F _dynafed dynafed
""",
    "zsh": """\
# In ~/.zshrc, after compinit: eval "$(dynafed completion zsh)"
_dynafed() {
    local -a found
    found=("${(@f)$(dynafed complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then compadd -Q -- "${found[@]}"; else _files; fi
}
compdef _dynafed dynafed
""",
    "fish": """\
# In ~/.config/fish/config.fish: dynafed completion fish | source
function __dynafed
    dynafed complete -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null
end
complete -c dynafed -a '(__dynafed)'
""",
}


def register(commands: Commands) -> None:
    """Add the commands; `complete` is for the scripts, and not listed."""
    script = add_command(commands, "completion", _script, "Print the script that completes commands in a shell.")
    script.add_argument("shell", choices=SCRIPTS)
    words = commands.add_parser("complete")
    words.add_argument("words", nargs="*")
    words.set_defaults(command=lambda args: print("\n".join(complete(args.words))))


def _script(args: argparse.Namespace) -> None:
    print(SCRIPTS[args.shell], end="")


def complete(words: list[str]) -> list[str]:
    """What the last of `words` may become, given those before it; nothing where a file name is wanted."""
    from dynafed.cli import make_parser

    *before, word = words or [""]
    parser, option, positionals = make_parser(), None, 0
    for one in before:
        commands = _commands(parser)
        if option is not None:
            option = None
        elif one.startswith("-"):
            action = parser._option_string_actions.get(one)
            option = action if action is not None and action.nargs != 0 else None
        elif one in commands:
            parser, positionals = commands[one], 0
        else:
            positionals += 1
    if option is None and word.startswith("-"):
        found: Iterable[str] = parser._option_string_actions
    elif option is None and (commands := _commands(parser)):
        found = [name for name in commands if name != "complete"]
    else:
        found = _values(option or _positional(parser, positionals), word)
    return sorted(one for one in found if one.startswith(word))


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _positional(parser: argparse.ArgumentParser, number: int) -> argparse.Action | None:
    """The argument at this place; the last one may take many."""
    places = [action for action in parser._actions if not action.option_strings]
    if number < len(places):
        return places[number]
    return places[-1] if places and places[-1].nargs in ("*", "+") else None


def _values(action: argparse.Action | None, word: str) -> Iterable[str]:
    if action is None:
        return []
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    find = VALUES.get(action.dest)
    return find(word) if find else []


def _presets(word: str) -> list[str]:
    from dynafed.config import presets

    return [*presets(), *(name for name in _inside(word) if name.endswith(".toml")), *_folders(word)]


def _settings(word: str) -> list[str]:
    """Keys with an equals sign, sections with a dot; after the dot the section's keys, after the sign the choices."""
    from dynafed.config import Config, installed_sections

    key, equals, value = word.partition("=")
    section, dot, name = key.partition(".")
    group = Config if not dot else installed_sections().get(section)
    if group is None:
        return []
    fields = {field.name: field for field in dataclasses.fields(group) if "doc" in field.metadata}
    prefix = section + dot if dot else ""
    if not equals:
        return [f"{prefix}{one}=" for one in fields]
    name = name if dot else section
    if key == "method":
        return [f"{key}={one}" for one in _methods(value)]
    choices = (fields[name].metadata["choices"] if name in fields else None) or ()
    return [f"{key}={one}" for one in choices]


def method_names() -> list[str]:
    """The names of our methods, read off their files: importing these takes a second or two."""
    files = (file for file in resources.files("dynafed").joinpath("methods").iterdir() if file.name.endswith(".py"))
    return [name for file in files for name in re.findall(r'^    name = "(.+)"', file.read_text(), flags=re.MULTILINE)]


def _methods(word: str) -> list[str]:
    """The methods, after those that are there already."""
    before = word[: max(word.rfind(","), word.rfind("+")) + 1]
    return [before + name for name in method_names()]


def _folders(word: str) -> list[str]:
    return [name + "/" for name in _inside(word) if Path(name).is_dir()]


def _inside(word: str) -> list[str]:
    """What is in the folder of a name that is being typed."""
    folder = os.path.dirname(word)
    return [os.path.join(folder, name) for name in os.listdir(folder or ".")] if Path(folder or ".").is_dir() else []


def _datasets(word: str) -> list[str]:
    from dynafed.data.spec import DATASETS

    return DATASETS.names()


def _sections(word: str) -> list[str]:
    from dynafed.config import installed_sections

    return list(installed_sections())


VALUES: dict[str, Callable[[str], list[str]]] = {
    "source": _presets,
    "set": _settings,
    "methods": _methods,
    "path": _folders,
    "paths": _folders,
    "trajectory": _folders,
    "name": _datasets,
    "section": _sections,
}
"""What completes a value, by the argument's name."""

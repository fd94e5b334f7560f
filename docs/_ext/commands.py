"""The reference of the command line, from the commands themselves.

sphinx-click reads click's commands, and typer has its own copy of click. sphinxcontrib-typer prints the terminal's help
as one picture. Neither makes options that the search finds, so this module writes one page per command.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from rich.text import Text

_TYPES = {"str": "TEXT", "int": "N", "float": "NUMBER", "Path": "PATH", "bool": ""}


def all_commands() -> Iterator[tuple[str, Any]]:
    """Name as typed, and typer's command: groups first, then their commands."""
    from recshard_lab.cli import app

    yield from _under("recshard", typer.main.get_command(app))


def _under(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from _under(f"{name} {word}", inner)


def file_name(command: str) -> str:
    """The page of a command, without its suffix.

    >>> file_name("recshard"), file_name("recshard plan make")
    ('index', 'plan_make')
    """
    return "_".join(command.split()[1:]) or "index"


def write_pages(folder: Path) -> None:
    """Writes one page of Markdown for each command."""
    folder.mkdir(exist_ok=True)
    for name, command in all_commands():
        text = "\n".join(_page(name, command))
        file = folder / f"{file_name(name)}.md"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def _page(name: str, command: Any) -> Iterator[str]:
    yield from [f"# {name}", "", _escaped(command.help or ""), ""]
    parts = {kind: [p for p in command.params if p.param_type_name == kind] for kind in ("argument", "option")}
    usage = [_argument(p) for p in parts["argument"]]
    usage += ["[OPTIONS]"] if parts["option"] else []
    usage += ["COMMAND"] if hasattr(command, "commands") else []
    yield from ["```text", " ".join([name, *usage]), "```", ""]
    if hasattr(command, "commands"):
        yield from ["| command | effect |", "|---|---|"]
        for word, inner in command.commands.items():
            link = file_name(f"{name} {word}")
            yield f"| [{name} {word}]({link}.md) | {_escaped(inner.help or '')} |"
        yield from ["", "```{toctree}", ":hidden:", ""]
        yield from (file_name(f"{name} {word}") for word in command.commands)
        yield from ["```", ""]
    if parts["argument"]:
        yield from ["| argument | meaning |", "|---|---|"]
        yield from (f"| `{_argument(p)}` | {_meaning(p)} |" for p in parts["argument"])
        yield ""
    if parts["option"]:
        yield from ["| option | meaning |", "|---|---|"]
        yield from (f"| {_spellings(p)} | {_meaning(p)} |" for p in parts["option"])
        yield ""
    yield from _epilog(command.epilog or "")


def _argument(parameter: Any) -> str:
    word = (parameter.metavar or parameter.name).strip("[]")
    return (word if parameter.required else f"[{word}]") + ("..." if parameter.nargs == -1 else "")


def _spellings(parameter: Any) -> str:
    value = ""
    if not parameter.is_flag:
        kind = getattr(parameter.type_descriptor.annotation, "__name__", "")
        value = " " + (parameter.metavar or _TYPES.get(kind, "VALUE"))
    names = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{name}{value}`" for name in names)


def _meaning(parameter: Any) -> str:
    words = [_escaped(parameter.help or "")]
    default = parameter.default
    if parameter.required:
        words.append("Required.")
    elif default not in (None, "", False, True, ()) and not callable(default) and "Default" not in words[0]:
        words.append(f"Default: `{default}`.")
    if parameter.multiple:
        words += [] if "Repeat" in words[0] else ["Repeat it for more values."]
    return " ".join(word for word in words if word)


def _epilog(text: str) -> Iterator[str]:
    for panel in text.split("\n\n"):
        head, _, lines = Text.from_markup(panel).plain.partition("\n")
        if head:
            yield from [f"**{head}**", "", "```text", lines, "```", ""]


def _escaped(text: str) -> str:
    return (
        re.sub(r"([<>|*_\[\]])", r"\\\1", Text.from_markup(text).plain) if "`" not in text else text.replace("|", "\\|")
    )

"""Errors of the command line: what failed, with the value, why, and one fix. Removed spellings name their successor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

UsageError: Any = typer.BadParameter.__bases__[0]
"""The base class of typer's errors about words on the command line."""

COMMANDS = {"recshard compare": "recshard plan compare", "recshard whatif": "recshard plan sweep"}
"""Removed command -> its successor."""

OPTIONS = {
    "recshard plan": {
        "--example": "recshard plan make --example",
        "--schema": "recshard plan make --schema for tables, recshard plan check --schema for plans",
        "--check": "recshard plan check PLAN",
        "--explain": "recshard plan explain SOURCE TABLE",
        "--why-not": "recshard plan explain SOURCE --why-not TABLE=SCHEME",
        "--diff": "recshard plan diff SOURCE OLD",
    },
    "recshard plan make": {
        "--world-size": "--ranks",
        "--html": "--out FILE.html",
        "--script": "--out FILE.py",
        "--torchrec": "--out FILE.pt",
        "--check": "recshard plan check PLAN",
        "--explain": "recshard plan explain SOURCE TABLE",
        "--why-not": "recshard plan explain SOURCE --why-not TABLE=SCHEME",
        "--diff": "recshard plan diff SOURCE OLD",
    },
    "recshard plan compare": {"--world-size": "--ranks", "--to": "--out FILE"},
    "recshard plan sweep": {"--world-size": "--ranks", "--html": "--out FILE.html", "--csv": "--out FILE.csv"},
}
"""Command -> removed option -> what replaces it."""


def usage_text(error: Any, words: Sequence[str] = ()) -> str:
    """The text of a `UsageError`.

    Args:
        error: as typer raises it: an unknown command or option, a value that cannot be parsed, a missing argument.
        words: of the command line, from which the text takes the value of an option.
    """
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "recshard"
    message = re.sub(r"\s+", " ", error.message).strip()
    if (valueless := re.match(r"Option ['\"](.*?)['\"] requires an argument", message)) is not None:
        return f"{valueless[1]} has no value. Fix: write one after {valueless[1]}."
    if (extra := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message)) is not None:
        return f"{extra[1]!r} is one argument too many for {command}. Fix: leave it out."
    if (unknown := re.match(r"No such command ['\"](.*?)['\"]", message)) is not None:
        return _unknown_command(command, unknown[1], context)
    option = getattr(error, "option_name", None)
    if message.startswith("No such option") and option is not None:
        return _unknown_option(command, option, context)
    parameter = getattr(error, "param", None)
    if parameter is None:
        return message if "Fix:" in message else f"{_sentence(message)} Fix: see {command} --help."
    if parameter.param_type_name == "argument":
        name = parameter.metavar or str(parameter.name).upper()
    else:
        name = _with_value(max(parameter.opts, key=len), parameter.opts, words)
    if "Fix:" in message:
        return f"{name}: {message}"
    if type(error).__name__ == "MissingParameter":
        return f"{name} is missing: {command} needs it. Fix: {_usage(context)}"
    return f"{name}: {_sentence(message[:1].lower() + message[1:])} Fix: pass a value as in {command} --help."


def error_text(error: Exception) -> str:
    """The text of an error that a command raised because of what the user passed."""
    from recshard_lab.planner.answers.refusals import PlanDoesNotFit

    if isinstance(error, PlanDoesNotFit):
        return error.worded("command_line")
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"{str(error.filename)!r} does not exist in {Path.cwd()}. Fix: correct the path."
    return str(error)


def _unknown_command(command: str, word: str, context: Any) -> str:
    path = f"{command} {word}"
    if path in COMMANDS:
        return f"{path!r} was renamed. Fix: {COMMANDS[path]}"
    if command == "recshard plan" and (":" in word or Path(word).suffix):
        return f"{path!r} was renamed: recshard plan is a group of commands. Fix: recshard plan make {word}"
    names = list(context.command.commands) if context is not None else []
    near = get_close_matches(word, names, n=1)
    if near:
        return f"{word!r} is not a command of {command} (did you mean {near[0]!r}?). Fix: {command} {near[0]}"
    return f"{word!r} is not a command of {command}. Fix: use one of {', '.join(names)}."


def _unknown_option(command: str, option: str, context: Any) -> str:
    removed = OPTIONS.get(command, {}).get(option)
    if removed is not None:
        return f"{option!r} of {command!r} was renamed. Fix: {removed}"
    if command == "recshard plan":  # was a command with options itself
        make = context.command.commands["make"]
        if any(option in parameter.opts for parameter in make.params):
            return f"{option!r} is an option of the commands of {command}. Fix: recshard plan make SOURCE {option} ..."
        if option in OPTIONS["recshard plan make"]:
            return f"{option!r} was renamed. Fix: recshard plan make SOURCE {OPTIONS['recshard plan make'][option]}"
    names = [name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)]
    near = get_close_matches(option.lstrip("-"), [name[2:] for name in names if name.startswith("--")], n=1)
    if near:
        return f"{option!r} is not an option of {command} (did you mean '--{near[0]}'?). Fix: --{near[0]}"
    return f"{option!r} is not an option of {command}. Fix: {command} --help lists its options."


def _usage(context: Any) -> str:
    """A command with its required arguments."""
    words = [
        parameter.metavar or str(parameter.name).upper()
        for parameter in context.command.params
        if parameter.param_type_name == "argument" and parameter.required
    ]
    words += [
        f"{max(parameter.opts, key=len)} {parameter.metavar or str(parameter.name).upper()}"
        for parameter in context.command.params
        if parameter.param_type_name == "option" and parameter.required
    ]
    return " ".join([context.command_path, *words])


def _with_value(name: str, names: Sequence[str], words: Sequence[str]) -> str:
    """An option with the last value that the user typed.

    >>> _with_value("--ranks", ["--ranks", "-n"], ["plan", "make", "-n", "0"])
    '--ranks 0'
    """
    for word, following in reversed(list(zip(words, [*words[1:], ""], strict=True))):
        if word in names:
            return f"{name} {following}".strip()
        if word.partition("=")[0] in names:
            return f"{name} {word.partition('=')[2]}"
    return name


def _sentence(message: str) -> str:
    return message if message.endswith((".", "!", "?")) else f"{message}."

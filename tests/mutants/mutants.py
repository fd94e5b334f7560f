"""The mutants of ``mutants.toml``: plausible mistakes, and the tests that must fail on each."""

import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """One text replaced in one file.

    Attributes:
        name: room and what goes wrong.
        file: from the root of the repository.
        old, new: the texts.
        tests: arguments of pytest.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def _read() -> list[Mutant]:
    return [
        Mutant(
            one["name"],
            f"recshard_lab/{one['file']}",
            one["old"],
            one["new"],
            list(map(_path, shlex.split(one["tests"]))),
        )
        for one in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutant"]
    ]


def _path(word: str) -> str:
    return f"tests/{word}" if word.endswith(".py") and not word.startswith("recshard_lab/") else word


MUTANTS = _read()

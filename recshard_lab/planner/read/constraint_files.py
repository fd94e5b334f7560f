"""Reads constraints from YAML or JSON: table name -> fields of `ParameterConstraints`.

::

    movies:
      sharding_types: [row_wise, column_wise]
      ranks: [0, 1]
    users:
      shards: [[0, 0, 500, 0, 64], [1, 500, 1000, 0, 64]]   # rank, rows [r0, r1), columns [c0, c1)
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from recshard_lab.arguments import checks_arguments, shown
from recshard_lab.documents import Document, read_document, with_fix
from recshard_lab.planner.answers.text import use_one_of
from recshard_lab.sharding import ParameterConstraints, Shard
from recshard_lab.sharding.plan.types import TIERS

FIELDS = tuple(each.name for each in fields(ParameterConstraints))


@checks_arguments
def read_constraints(path: str | Path, tables: Sequence[str] | None = None) -> dict[str, ParameterConstraints]:
    """Reads constraints from a file: .yaml, .yml or .json.

    Args:
        path: of the file.
        tables: the known table names. Default: any name is accepted.

    Raises:
        ValueError: the mistake, with file, line and field.
        OSError: the file cannot be read.

    >>> from tempfile import mkdtemp
    >>> file = Path(mkdtemp()) / "constraints.yaml"
    >>> _ = file.write_text("movies: {sharding_types: [row_wise], ranks: [0, 1]}")
    >>> read_constraints(file)["movies"].ranks
    [0, 1]
    """
    document = read_document(path)
    if not isinstance(document.content, dict):
        raise ValueError(
            f"{document.where()}: must be an object of table names, got {shown(document.content)}. Fix: "
            f"table_name: {{sharding_types: [row_wise]}}."
        )
    known = None if tables is None else list(tables)
    found = {}
    for name, entry in document.content.items():
        if not isinstance(name, str):
            raise ValueError(
                f"{document.where()}: a table name must be text, got {shown(name)}. Fix: write it in quotes."
            )
        if known is not None and name not in known:
            raise ValueError(f"{document.where([name])}: unknown table{use_one_of(name, known)}.")
        found[name] = _constraint(document, name, entry)
    return found


def _constraint(document: Document, name: str, entry: Any) -> ParameterConstraints:
    if not isinstance(entry, dict):
        raise ValueError(
            f"{document.where([name])}: must be an object, got {shown(entry)}. Fix: use fields of {', '.join(FIELDS)}."
        )
    for key in entry:
        if key not in FIELDS:
            raise ValueError(f"{document.where([name, key])}: unknown field{use_one_of(key, FIELDS)}.")
    given = dict(entry)
    if given.get("shards") is not None:
        where = document.where([name, "shards"])
        each = given["shards"]
        for numbers in each if isinstance(each, list) and each else [None]:
            listed = numbers if isinstance(numbers, list) else []
            if [type(number) for number in listed[:5]] != [int] * 5 or listed[5:] not in ([], *([t] for t in TIERS)):
                raise ValueError(
                    f"{where}: must be a list of [rank, r0, r1, c0, c1], got {shown(numbers)}. Fix: list each shard."
                )
        given["shards"] = [Shard(rank, (r0, r1), (c0, c1), *tier) for rank, r0, r1, c0, c1, *tier in each]
    try:
        return ParameterConstraints(**given)
    except ValueError as error:
        wrong = next((key for key in entry if str(error).startswith(str(key))), None)
        spot = document.where([name] if wrong is None else [name, wrong])
        raise ValueError(with_fix(f"{spot}: {error}", "correct this field")) from None

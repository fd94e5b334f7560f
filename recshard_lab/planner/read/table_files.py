"""Reads tables from YAML, JSON or CSV. Errors name the file, the line (in JSON the entry) and the field.

YAML and JSON hold a list of tables, or an object whose ``tables`` is that list. CSV has a header of field names and one
table per line; semicolons separate the features of a table. One table::

    - name: movies
      num_embeddings: 40_000
      embedding_dim: 64
      feature_names: [seen, liked]
      pooling: MEAN            # default SUM; NONE returns every row (EmbeddingConfig)
      data_type: FP16          # default FP32
      pooling_factor: [20, 3]  # ids per sample: one number, or one per feature
      zipf_alpha: 1.05         # or unique_fraction: 0.2, or access: meta_2021

A dynamic table (`DynamicEmbeddingConfig`) has ``dynamic: true`` and ``capacity`` instead of ``num_embeddings``::

    - name: users
      dynamic: true
      capacity: 1_000_000
      max_capacity: 4_000_000  # default: capacity; the planner reserves memory for it
      embedding_dim: 64
      feature_names: [user]
      evict: lfu               # default lru
      admit: 2                 # occurrences before an id gets a row, or a probability; default all
"""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recshard_lab.arguments import checks_arguments, shown
from recshard_lab.documents import parsed, read_text, with_fix
from recshard_lab.embedding.configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_tables,
)
from recshard_lab.embedding.dynamic.config import ABSENT, EVICT, DynamicEmbeddingConfig
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding.plan.types import nearest

_NEEDED = ("name", "num_embeddings", "embedding_dim", "feature_names")
_NEEDED_IF_DYNAMIC = ("name", "capacity", "embedding_dim", "feature_names")
_DYNAMIC = ("capacity", "max_capacity", "evict", "admit", "absent", "choices", "seed")
_LOADS = ("zipf_alpha", "unique_fraction", "access")
FILE_TYPES = (".yaml", ".yml", ".json", ".csv")
MEANT = dict.fromkeys(("rows", "num_rows", "size", "num_embedding", "cardinality", "vocab_size"), "num_embeddings")
MEANT |= dict.fromkeys(("dim", "cols", "columns", "embedding_size", "emb_dim", "d"), "embedding_dim")
MEANT |= dict.fromkeys(("feature", "features", "keys"), "feature_names")
MEANT |= dict.fromkeys(("table", "table_name"), "name") | dict.fromkeys(("dtype", "type"), "data_type")
"""Common other names of a field -> its name here."""
EXAMPLE_ENTRY = """\
- {name: movies, num_embeddings: 40000, embedding_dim: 64, feature_names: [seen]}
- {name: users, num_embeddings: 900, embedding_dim: 64, feature_names: [user]}"""
_ONE_OR_MORE = {"type": "array", "minItems": 1}
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Tables for recshard plan make (YAML or JSON)",
    "oneOf": [
        {"$ref": "#/$defs/tables"},
        {"type": "object", "properties": {"tables": {"$ref": "#/$defs/tables"}}, "required": ["tables"],
         "additionalProperties": False},
    ],
    "$defs": {
        "tables": {**_ONE_OR_MORE, "items": {"$ref": "#/$defs/table"}},
        "table": {
            "type": "object",
            "required": [name for name in _NEEDED if name != "num_embeddings"],
            "oneOf": [
                {"required": ["num_embeddings"],
                 "properties": {"dynamic": {"const": False}, **dict.fromkeys(_DYNAMIC, False)}},
                {"required": ["dynamic", "capacity"],
                 "properties": {"dynamic": {"const": True}, "num_embeddings": False}},
            ],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "num_embeddings": {"type": "integer", "minimum": 1, "description": "rows"},
                "embedding_dim": {"type": "integer", "minimum": 1, "description": "columns"},
                "feature_names": {"oneOf": [{"type": "string"}, {**_ONE_OR_MORE, "items": {"type": "string"}}]},
                "pooling": {"enum": list(PoolingType.__members__), "default": "SUM"},
                "data_type": {"enum": list(DataType.__members__), "default": "FP32"},
                "weight_init_max": {"type": "number"},
                "weight_init_min": {"type": "number"},
                "pooling_factor": {
                    "oneOf": [{"type": "number", "minimum": 0}, {"type": "array", "items": {"type": "number"}}],
                    "description": "ids per sample, one number or one per feature",
                },
                "zipf_alpha": {"type": "number", "minimum": 0},
                "unique_fraction": {"type": "number", "minimum": 0},
                "access": {"enum": ["meta_2021"]},
                "dynamic": {"type": "boolean", "default": False, "description": "ids have any value"},
                "capacity": {"type": "integer", "minimum": 1, "description": "rows at first"},
                "max_capacity": {"type": "integer", "minimum": 1, "description": "rows at most"},
                "evict": {"enum": list(EVICT), "default": "lru"},
                "admit": {"type": "number", "exclusiveMinimum": 0},
                "absent": {"enum": list(ABSENT), "default": "initial"},
                "choices": {"enum": [1, 2], "default": 2},
                "seed": {"type": "integer", "default": 0},
            },
        },
    },
}  # fmt: skip
"""JSON Schema of a file of tables."""
FIELDS = (
    *_NEEDED, "pooling", "data_type", "weight_init_max", "weight_init_min", "pooling_factor", *_LOADS, "dynamic",
    *_DYNAMIC,
)  # fmt: skip


@dataclass(frozen=True)
class TableFile:
    """The contents of a file of tables.

    Attributes:
        tables: configs, in the file's order.
        pooling_factors: feature -> ids per sample, if the file has them.
        zipf_alpha, unique_fraction, access: table -> the value for `Workload`, if the file has one.
    """

    tables: list[BaseEmbeddingConfig]
    pooling_factors: dict[str, float] = field(default_factory=dict)
    zipf_alpha: dict[str, float] = field(default_factory=dict)
    unique_fraction: dict[str, float] = field(default_factory=dict)
    access: dict[str, str] = field(default_factory=dict)

    def workload(self, **arguments: Any) -> Workload:
        """The `Workload` of these tables. `arguments` are its other arguments, and override the file."""
        own = {name: getattr(self, name) for name in ("pooling_factors", *_LOADS) if getattr(self, name)}
        return Workload(**{**own, **arguments})


@checks_arguments
def read_tables(path: str | Path) -> TableFile:
    """Reads tables from a file: .yaml or .yml, .json, .csv.

    Raises:
        ValueError: the mistake, as ``FILE, line 7 (table 'movies'), field 'num_embeddings': ...``; for JSON with the
            number of the entry instead of the line.
        OSError: the file cannot be read.

    >>> from tempfile import mkdtemp
    >>> file = Path(mkdtemp()) / "tables.csv"
    >>> _ = file.write_text("name,num_embeddings,embedding_dim,feature_names\\nmovies,40000,64,seen;liked\\n")
    >>> read_tables(file).tables[0].feature_names
    ['seen', 'liked']
    """
    path, text = read_text(path, FILE_TYPES)
    found = TableFile([])
    named: dict[str, str] = {}
    try:
        for where, entry in _csv(text, str(path)) if path.suffix.lower() == ".csv" else _entries(path, text):
            _add(found, where, entry)
            name = found.tables[-1].name
            if name in named:
                raise ValueError(
                    f"{where} (table {name!r}), field 'name': another table has this name ({named[name]}). Fix: rename "
                    f"one of the two."
                )
            named[name] = where
        if not found.tables:
            raise ValueError(f"{path} holds no tables")
    except ValueError as error:
        raise ValueError(with_fix(error, f"write each table as\n{EXAMPLE_ENTRY}")) from None
    return found


def _add(found: TableFile, where: str, entry: Any) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: a table must be an object with {', '.join(_NEEDED)}, got {shown(entry)}")
    name = entry.get("name")
    where = f"{where} (table {name!r:.80})" if isinstance(name, str) else where
    for key in entry:
        if key not in FIELDS:
            meant = MEANT.get(str(key).lower())
            near = f" (did you mean {meant!r}?)" if meant else nearest(str(key)[:80], FIELDS)
            raise ValueError(f"{where}: unknown field {shown(key)}{near}; fields: {', '.join(FIELDS)}")
    dynamic = entry.get("dynamic", False)
    if not isinstance(dynamic, bool):
        raise ValueError(f"{where}, field 'dynamic': must be true or false, got {shown(dynamic)}. Fix: dynamic: true.")
    for key in ("num_embeddings",) if dynamic else _DYNAMIC:
        if entry.get(key) is not None:
            kind, fix = ("dynamic", "write capacity") if dynamic else ("static", "add dynamic: true")
            raise ValueError(f"{where}, field {key!r}: a {kind} table does not have it. Fix: {fix}.")
    for key in _NEEDED_IF_DYNAMIC if dynamic else _NEEDED:
        if entry.get(key) in (None, "", []):
            raise ValueError(f"{where}: field {key!r} is missing. Fix: add it.")
    features = entry["feature_names"]
    features = [features] if isinstance(features, str) else features
    given: dict[str, Any] = {"name": name, "feature_names": features}
    given |= {key: entry[key] for key in ("num_embeddings", "embedding_dim", *_DYNAMIC) if entry.get(key) is not None}
    for key in ("weight_init_max", "weight_init_min"):
        if entry.get(key) is not None:
            given[key] = _number(entry[key], f"{where}, field {key!r}", signed=True)
    given["data_type"] = _member(DataType, entry.get("data_type", "FP32"), f"{where}, field 'data_type'")
    pooling = _member(PoolingType, entry.get("pooling", "SUM"), f"{where}, field 'pooling'")
    try:
        if dynamic:
            found.tables.append(DynamicEmbeddingConfig(**given, pooling=pooling))
        elif pooling is PoolingType.NONE:
            found.tables.append(EmbeddingConfig(**given))
        else:
            found.tables.append(EmbeddingBagConfig(**given, pooling=pooling))
        check_tables(found.tables[-1:])
    except ValueError as error:
        words = str(error).removeprefix(f"table {name!r}: ")
        wrong = next((f", field {key!r}" for key in FIELDS if words.startswith(key)), "")
        raise ValueError(f"{where}{wrong}: {words}") from None
    _add_loads(found, where, entry, found.tables[-1].feature_names)


def _add_loads(found: TableFile, where: str, entry: dict[str, Any], features: list[str]) -> None:
    factor = entry.get("pooling_factor")
    if factor is not None:
        spot = f"{where}, field 'pooling_factor'"
        each = factor if isinstance(factor, list) else [factor] * len(features)
        if len(each) != len(features):
            raise ValueError(
                f"{spot}: {len(features)} features need one number or {len(features)}, got {len(each)}. Fix: write one "
                f"number per feature."
            )
        for feature, number in zip(features, each, strict=True):
            value = _number(number, spot)
            if found.pooling_factors.setdefault(feature, value) != value:
                raise ValueError(
                    f"{spot}: feature {feature!r} has {value:g} ids per sample here and "
                    f"{found.pooling_factors[feature]:g} in another table. Fix: write the same number in both."
                )
    for key in ("zipf_alpha", "unique_fraction"):
        if entry.get(key) is not None:
            getattr(found, key)[entry["name"]] = _number(entry[key], f"{where}, field {key!r}")
    if entry.get("access") is not None:
        if entry["access"] != "meta_2021":
            got = shown(entry["access"])
            raise ValueError(f"{where}, field 'access': must be 'meta_2021', got {got}. Fix: access: meta_2021.")
        found.access[entry["name"]] = entry["access"]


def _member(kind: Any, given: Any, where: str) -> Any:
    spelled = given.upper()[:80] if isinstance(given, str) else ""
    if spelled in kind.__members__:
        return kind[spelled]
    if given is None and "NONE" in kind.__members__:  # YAML's null
        raise ValueError(
            f"{where}: must be one of {', '.join(kind.__members__)}, got null. Fix: write 'NONE' in quotes."
        )
    names = list(kind.__members__)
    raise ValueError(
        f"{where}: {shown(given)} is not one of {', '.join(names)}{nearest(spelled, names)}. Fix: use one."
    )


def _number(given: Any, where: str, signed: bool = False) -> float:
    real = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not real or not abs(given) < float("inf") or (given < 0 and not signed):
        kind = f"a finite number{'' if signed else ' from 0 up'}"
        raise ValueError(f"{where}: must be {kind}, got {shown(given)}. Fix: write a number.")
    return float(given)


def _listed(document: Any, where: str) -> list[Any]:
    if isinstance(document, dict):
        extra = [key for key in document if key != "tables"]
        if "tables" not in document or extra:
            names = ", ".join(map(str, list(document)[:8]))
            raise ValueError(f"{where}: the object must have 'tables' and no other key, got {names:.200}")
        document = document["tables"]
    if not isinstance(document, list):
        raise ValueError(f"{where}: must be a list of tables with {', '.join(_NEEDED)}, got {shown(document)}")
    return document


def _entries(path: Path, text: str) -> list[tuple[str, Any]]:
    """The tables of a YAML or JSON file, each with its file and line."""
    document = parsed(path, text)
    keys = ("tables",) if isinstance(document.content, dict) else ()
    listed = _listed(document.content, str(path))
    lines = [document.lines.get((*keys, i)) for i in range(len(listed))]
    spots = [f"entry {i}" if line is None else f"line {line}" for i, line in enumerate(lines, 1)]
    return [(f"{path}, {spot}", entry) for spot, entry in zip(spots, listed, strict=True)]


def _csv(text: str, where: str) -> list[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    found = []
    try:
        names = [name.strip() for name in reader.fieldnames or ()]
        if len(set(names)) < len(names):
            raise ValueError(
                f"{where}, line 1: a column occurs twice in the header {', '.join(names)}. Fix: remove one."
            )
        reader.fieldnames = names
        for row in reader:
            spot = f"{where}, line {reader.line_num}"
            if None in row or None in row.values():
                raise ValueError(
                    f"{spot}: the header has {len(names)} columns and this line has another number. Fix: add or remove "
                    f"commas."
                )
            found.append((spot, {key: _cell(key, value.strip(), spot) for key, value in row.items() if value.strip()}))
    except csv.Error as error:
        raise ValueError(f"{where}, line {reader.line_num}: not CSV: {error}. Fix: correct this line.") from None
    return found


def _cell(key: str, value: str, where: str) -> Any:
    if key == "feature_names":
        return [name.strip() for name in value.split(";")]
    if key == "dynamic":
        return {"true": True, "false": False}.get(value.lower(), value)
    kinds: dict[str, Callable[[str], Any]] = dict.fromkeys(
        ("num_embeddings", "embedding_dim", "capacity", "max_capacity", "choices", "seed"), int
    )
    kinds |= dict.fromkeys(("zipf_alpha", "unique_fraction", "weight_init_max", "weight_init_min", "admit"), float)
    try:
        if key == "pooling_factor":
            each = [float(number) for number in value.split(";")]
            return each if len(each) > 1 else each[0]
        return kinds.get(key, str)(value)
    except ValueError:
        raise ValueError(
            f"{where}, field {key!r}: must be a number, got {shown(value)}. Fix: write a number."
        ) from None

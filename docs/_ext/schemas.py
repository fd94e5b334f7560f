"""The fields of the files that commands read, as tables, from the code that checks these files."""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


class SchemaTable(SphinxDirective):
    """``{schema} train``, ``{schema} tables`` or ``{schema} constraints``: every field with type, default, meaning."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        sections = {"train": train_sections, "tables": table_sections, "constraints": constraint_sections}
        lines = [line for section in sections[self.arguments[0]]() for line in section]
        return self.parse_text_to_nodes("\n".join(lines))


def train_sections() -> Iterator[list[str]]:
    """The run's own fields, then one table for each section."""
    from recshard_lab.train.job import config

    schema = config.TrainConfig.model_json_schema()
    meanings = _arguments(config.TrainConfig)
    yield _table("A run", "", schema["properties"], schema["required"], meanings)
    used = {_reference(field): name for name, field in schema["properties"].items() if _reference(field)}
    for definition, section in sorted(schema["$defs"].items(), key=lambda pair: used.get(pair[0], "optimizer.z")):
        name = used.get(definition) or {"TableOptimizer": "optimizer.tables", "DenseOptimizer": "optimizer.dense"}.get(
            definition, "optimizer.schedule"
        )
        kind = getattr(config, definition)
        about = inspect.cleandoc(kind.__doc__).partition("\n\nArgs:")[0].replace("``", "`")
        yield _table(name, about, section["properties"], section.get("required", []), _arguments(kind))


def table_sections() -> Iterator[list[str]]:
    """The fields of one table."""
    from recshard_lab.planner.read.table_files import SCHEMA

    schema = SCHEMA["$defs"]["table"]
    yield _table("A table", "", schema["properties"], schema["required"], {})


def constraint_sections() -> Iterator[list[str]]:
    """The fields of one table's constraints."""
    from recshard_lab import ParameterConstraints

    meanings = _arguments(ParameterConstraints)
    rows = [f"| `{field.name}` | {meanings[field.name]} |" for field in dataclasses.fields(ParameterConstraints)]
    yield ["| field | meaning |", "|---|---|", *rows, ""]


def _table(
    name: str, about: str, fields: Mapping[str, Any], required: list[str], meanings: Mapping[str, str]
) -> list[str]:
    lines = [
        f"**{name}**",
        "",
        *([about, ""] if about else []),
        "| field | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for key, field in fields.items():
        default = "required" if key in required else _value(field.get("default"))
        meaning = meanings.get(key) or field.get("description", "")
        lines.append(f"| `{key}` | {_type(field)} | {default} | {_cell(meaning)} |")
    return [*lines, ""]


def _type(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if _reference(field):
        return "section"
    for word in ("anyOf", "oneOf"):
        if word in field:
            return " or ".join(dict.fromkeys(_type(each) for each in field[word] if each.get("type") != "null"))
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    low, above = field.get("minimum"), field.get("exclusiveMinimum")
    limit = f", at least {low}" if low is not None else f", above {above}" if above is not None else ""
    return str(field.get("type", "any")) + limit


def _reference(field: Mapping[str, Any]) -> str:
    places = [field, *field.get("anyOf", [])]
    return next((str(each["$ref"]).rpartition("/")[2] for each in places if "$ref" in each), "")


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return "the section's defaults"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _arguments(documented: type) -> dict[str, str]:
    """The ``Args:`` of a docstring: name -> meaning. ``a, b: meaning`` documents both."""
    text = inspect.cleandoc(documented.__doc__ or "").partition("Args:\n")[2]
    block = re.split(r"\n(?=\S)", text)[0]
    found: dict[str, str] = {}
    for names, meaning in re.findall(r"(?ms)^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", block):
        found |= {name.strip(): _cell(meaning) for name in names.split(",")}
    return found

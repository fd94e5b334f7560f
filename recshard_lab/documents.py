"""YAML and JSON files as plain data whose every entry knows its line, so that a mistake in one can be pointed at."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Keys = tuple[str | int, ...]
FILE_TYPES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Document:
    """What a file says.

    Attributes:
        path: of the file.
        content: dicts, lists, strings, numbers, True, False and None.
        lines: keys that lead to an entry -> its line; empty for JSON.
    """

    path: Path
    content: Any
    lines: dict[Keys, int] = field(default_factory=dict, repr=False)

    def where(self, keys: Sequence[str | int] = ()) -> str:
        """Where an entry stands, for a message: ``FILE, line 7, field 'model.tables'``."""
        keys = tuple(keys)
        line = next((self.lines[keys[:n]] for n in range(len(keys), -1, -1) if keys[:n] in self.lines), None)
        spot = "" if line is None else f", line {line}"
        return f"{self.path}{spot}" + (f", field {dotted(keys)!r}" if keys else "")


def dotted(keys: Sequence[str | int]) -> str:
    """Keys as a reader writes them.

    >>> dotted(("metrics", 0, "name"))
    'metrics[0].name'
    """
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def read_document(path: str | Path) -> Document:
    """Reads a file; its ending says the format.

    Raises:
        ValueError: another ending, text that is not of that format (with its line), a key that occurs twice.
        OSError: the file cannot be read.
    """
    path = Path(path)
    if path.suffix.lower() not in FILE_TYPES:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(FILE_TYPES)}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    except ValueError as error:  # a path with a NUL in it
        raise ValueError(f"{str(path)!r} is no path: {error}") from None
    try:
        return _json(path, text) if path.suffix.lower() == ".json" else _yaml(path, text)
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None


def _json(path: Path, text: str) -> Document:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name in (names := [name for name, _ in pairs]):
            if names.count(name) > 1:
                raise ValueError(f"{path}: field {name!r} occurs twice in one object")
        return dict(pairs)

    try:
        return Document(path, json.loads(text, object_pairs_hook=distinct))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None


def _yaml(path: Path, text: str) -> Document:
    import yaml

    class Loader(yaml.SafeLoader):
        """With YAML 1.2's numbers: 1e-3 is one."""

    number = re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    lines: dict[Keys, int] = {}
    try:
        loader = Loader(text)
        try:
            root = loader.get_single_node()
            _note(root, (), lines, path, set())
            content = None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        spot = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path}{spot}: not YAML: {getattr(error, 'problem', None) or error}") from None
    return Document(path, content, lines)


def _note(node: Any, keys: Keys, lines: dict[Keys, int], path: Path, above: set[int]) -> None:
    """Notes the line of every entry below `node`."""
    import yaml

    if node is None or id(node) in above:
        return
    lines.setdefault(keys, node.start_mark.line + 1)
    above = above | {id(node)}
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key)
            if name in seen:
                raise ValueError(f"{path}, line {key.start_mark.line + 1}: field {name!r} occurs twice in one object")
            seen.add(name)
            lines[*keys, name] = key.start_mark.line + 1
            _note(value, (*keys, name), lines, path, above)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _note(value, (*keys, i), lines, path, above)

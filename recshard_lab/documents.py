"""YAML and JSON files as plain data, within limits, whose every entry knows its line.

Every reader of this package begins here. An untrusted file is harmless: YAML tags never run, and size, depth,
aliases and the length of numbers are limited. Every error names the file, the line or the field, and a fix.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recshard_lab.arguments import shown

Keys = tuple[str | int, ...]
FILE_TYPES = (".yaml", ".yml", ".json")
MOST_BYTES = {".yaml": 4 * 2**20, ".yml": 4 * 2**20, ".csv": 64 * 2**20, ".json": 256 * 2**20}
MOST_DEPTH = 64  # lists and objects inside each other, in YAML
MOST_ENTRIES = 300_000  # of a YAML file; the target of an alias counts at each use
MOST_DIGITS = 18  # of a whole number, so that it fits 64 bits
_LONG = re.compile(rf"\d{{{MOST_DIGITS + 1},}}")


@dataclass(frozen=True)
class Document:
    """The content of a file.

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
        return f"{self.path}{spot}" + (f", field {dotted(keys)!r:.200}" if keys else "")


def dotted(keys: Sequence[str | int]) -> str:
    """Keys as a reader writes them.

    >>> dotted(("metrics", 0, "name"))
    'metrics[0].name'
    """
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def with_fix(words: object, fix: str) -> str:
    """A message of at most 1,500 characters that ends with a fix, `fix` where it names none.

    >>> with_fix("field 'rows' is missing", "add it")
    "field 'rows' is missing. Fix: add it."
    """
    text = str(words)
    if "Fix: " in text[:1500]:
        return text[:1500]
    text = text if len(text) <= 1300 else f"{text[:1297]}..."
    return f"{text.rstrip('.')}. Fix: {fix}."


def read_text(path: str | Path, types: Sequence[str] = FILE_TYPES) -> tuple[Path, str]:
    """Reads a file of one of these endings as text; of any ending if none is listed.

    Raises:
        ValueError: another ending, no regular file, more bytes than `MOST_BYTES` allows, text that is not UTF-8.
        OSError: the file cannot be read.
    """
    path = Path(path)
    ending = path.suffix.lower()
    most = MOST_BYTES.get(ending, MOST_BYTES[".json"])
    if types and ending not in types:
        raise ValueError(
            f"{_name(path)} ends in {ending!r:.40}: expected {', '.join(types)}. Fix: convert or rename it."
        )
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{_name(path)} is a pipe or device, not a file. Fix: write its content to a file.")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except ValueError as error:  # a path with a NUL in it
        raise ValueError(with_fix(f"{_name(path)}: {error}", "correct the path")) from None
    if len(data) > most:
        raise ValueError(
            f"{_name(path)} has more than {most // 2**20} MiB, the most that is read from such a file. "
            f"Fix: {'use .json or .csv' if ending in ('.yaml', '.yml') else 'split it'}."
        )
    try:
        return path, data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{_name(path)} is not UTF-8 text: {error}. Fix: save it as UTF-8.") from None


def read_document(path: str | Path) -> Document:
    """Reads a file; its ending names the format.

    Raises:
        ValueError: as `read_text`; text that is not of that format (with its line), a key that occurs twice, more than
            the limits of this module.
        OSError: the file cannot be read.
    """
    return parsed(*read_text(path))


def parsed(path: Path, text: str) -> Document:
    """The text of a file as data; the path's ending names the format.

    Raises:
        ValueError: as `read_document`.
    """
    if path.suffix.lower() == ".json":
        return Document(path, json_content(text, _name(path)))
    return _yaml(path, text)


def json_content(text: str, name: str) -> Any:
    """The content of JSON text.

    Args:
        name: of the file or argument that holds it, for messages.

    Raises:
        ValueError: not JSON (with its line), a key that occurs twice in one object, too deep, a number too long.

    >>> json_content('{"a": 1, "a": 2}', "plan.json")
    Traceback (most recent call last):
    ...
    ValueError: plan.json: field 'a' occurs twice in one object. Fix: remove one of the two.
    """

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for at, key in enumerate(names) if key in set(names[:at]))
            raise ValueError(f"{name}: field {twice!r:.80} occurs twice in one object. Fix: remove one of the two.")
        return found

    def whole(digits: str) -> int:
        if len(digits) > MOST_DIGITS + 1:
            raise ValueError(
                f"{name}: the number {digits[:20]}... has {len(digits):,} digits. Fix: write a smaller one."
            )
        return int(digits)

    try:
        return json.loads(text, object_pairs_hook=distinct, parse_int=whole if _LONG.search(text) else None)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}, line {error.lineno}: not JSON: {error.msg}. Fix: correct this line.") from None
    except RecursionError:
        raise ValueError(f"{name}: lists and objects are nested too deeply. Fix: remove levels.") from None


class _Frame:
    """A list or object that is being read."""

    def __init__(self, keys: Keys, content: Any, anchor: str | None, line: int) -> None:
        self.keys, self.content, self.anchor, self.line = keys, content, anchor, line
        self.key: Any = None  # the key whose value comes next
        self.has_key = False
        self.merged: list[dict[Any, Any]] = []
        self.size = 1


_MERGE: Any = object()


def _yaml(path: Path, text: str) -> Document:
    """Builds the content from the parser's events: without recursion, and without a constructor that could run code."""
    import yaml

    name, lines = _name(path), dict[Keys, int]()
    stack: list[_Frame] = []
    anchors: dict[str, tuple[Any, int]] = {}
    documents: list[Any] = []
    scalars = _Scalars()
    entries = 0

    def refuse(line: int, words: str, fix: str) -> ValueError:
        return ValueError(f"{name}, line {line}: {words}. Fix: {fix}.")

    def add(value: Any, size: int, line: int) -> None:
        """Puts a finished value where it belongs: into the list or object that is open."""
        nonlocal entries
        if not stack:
            documents.append(value)
            return
        top = stack[-1]
        top.size += size
        entries = max(entries, top.size)
        if entries > MOST_ENTRIES:
            raise refuse(
                line, f"more than {MOST_ENTRIES:,} entries, aliases counted", "use .json or .csv, or fewer aliases"
            )
        if isinstance(top.content, list):
            top.content.append(value)
        elif not top.has_key:
            if value is not _MERGE and (isinstance(value, (dict, list)) or not _hashable(value)):
                raise refuse(line, "a list or object is used as a key", "use text as the key")
            if value is not _MERGE and value in top.content:
                raise refuse(line, f"field {shown(value)} occurs twice in one object", "remove one of the two")
            top.key, top.has_key = value, True
            if value is not _MERGE:
                top.content[value] = None
                lines[*top.keys, value] = line
        else:
            top.has_key = False
            if top.key is _MERGE:
                merged = value if isinstance(value, list) else [value]
                if not all(isinstance(each, dict) for each in merged):
                    raise refuse(line, "<< must be followed by an object or a list of objects", "remove the <<")
                top.merged += merged
            else:
                top.content[top.key] = value

    def place() -> Keys:
        """The keys that lead to the value that comes next."""
        if not stack:
            return ()
        top = stack[-1]
        if isinstance(top.content, list):
            return (*top.keys, len(top.content))
        return (*top.keys, top.key) if top.has_key and top.key is not _MERGE else (*top.keys, "<<")

    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            line = event.start_mark.line + 1
            is_key = bool(stack) and isinstance(stack[-1].content, dict) and not stack[-1].has_key
            if isinstance(event, yaml.ScalarEvent):
                try:
                    value = scalars.value(event, is_key)
                except ValueError as error:
                    raise refuse(line, str(error), "correct this entry") from None
                if not is_key:
                    lines.setdefault(place(), line)
                if event.anchor is not None:
                    anchors[event.anchor] = value, 1
                add(value, 1, line)
            elif isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
                if event.tag is not None and event.tag not in _PLAIN:
                    raise refuse(line, f"the tag {event.tag!r:.60} is not read", "remove the tag")
                if len(stack) >= MOST_DEPTH:
                    raise refuse(line, f"lists and objects are nested more than {MOST_DEPTH} deep", "remove levels")
                if is_key:
                    raise refuse(line, "a list or object is used as a key", "use text as the key")
                keys = place()
                lines.setdefault(keys, line)
                content: Any = [] if isinstance(event, yaml.SequenceStartEvent) else {}
                stack.append(_Frame(keys, content, event.anchor, line))
                if event.anchor is not None:
                    anchors.pop(event.anchor, None)
            elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
                done = stack.pop()
                for each in done.merged:  # the object's own fields win, then the first that is merged
                    for key, value in each.items():
                        done.content.setdefault(key, value)
                if done.anchor is not None:
                    anchors[done.anchor] = done.content, done.size
                add(done.content, done.size, done.line)
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in anchors:
                    words = f"the alias *{event.anchor:.60} names no finished entry above it"
                    raise refuse(line, words, "write the value out")
                value, size = anchors[event.anchor]
                if not is_key:
                    lines.setdefault(place(), line)
                add(value, size, line)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        spot = f", line {mark.line + 1}" if mark is not None else ""
        words = f"{getattr(error, 'problem', None) or error}"
        raise ValueError(f"{name}{spot}: not YAML: {words:.200}. Fix: correct this line.") from None
    if len(documents) > 1:
        raise ValueError(f"{name} holds {len(documents)} documents, divided by ---. Fix: keep one.")
    return Document(path, documents[0] if documents else None, lines)


_PLAIN = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map", "!")


class _Scalars:
    """Turns YAML's scalars into text, numbers, True, False and None; dates stay text."""

    def __init__(self) -> None:
        import yaml

        class Resolver(yaml.resolver.Resolver):
            """With YAML 1.2's numbers: 1e-3 is one."""

        number = re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")
        Resolver.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
        self._resolver, self._scalar = Resolver(), yaml.ScalarNode
        make = yaml.constructor.SafeConstructor()
        self._makers = {
            "tag:yaml.org,2002:int": make.construct_yaml_int,
            "tag:yaml.org,2002:float": make.construct_yaml_float,
            "tag:yaml.org,2002:bool": make.construct_yaml_bool,
            "tag:yaml.org,2002:null": make.construct_yaml_null,
        }

    def value(self, event: Any, is_key: bool) -> Any:
        """The value of a scalar; `_MERGE` for the key ``<<``.

        Raises:
            ValueError: a tag that is not read; a number that is too long or is none.
        """
        tag = event.tag
        if tag is None or tag == "!":
            tag = self._resolver.resolve(self._scalar, event.value, event.implicit)
        if tag == "tag:yaml.org,2002:merge" and is_key:
            return _MERGE
        if tag not in self._makers:
            known = ("str", "merge", "timestamp", "value")
            if tag.removeprefix("tag:yaml.org,2002:") not in known:
                raise ValueError(f"the tag {tag!r:.60} is not read")
            return event.value
        if _LONG.search(event.value) and tag.endswith(":int"):
            raise ValueError(f"the number {event.value[:20]}... has {len(event.value):,} digits")
        try:
            value = self._makers[tag](self._scalar(tag, event.value))
        except (ValueError, KeyError, IndexError):
            raise ValueError(f"{shown(event.value)} is not of type {tag.rpartition(':')[2]}") from None
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"the number {shown(event.value)} does not fit 64 bits")
        return value


def _hashable(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _name(path: Path) -> str:
    """The path for a message, without control characters and not longer than 300."""
    text = str(path)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 300 else f"...{text[-297:]}"

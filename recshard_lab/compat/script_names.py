"""The names of TorchRec that a script uses, found in its text. Nothing is run."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any

from recshard_lab.compat.served import served_modules, target_of
from recshard_lab.compat.torchrec_names import PUBLIC

ROOT = "torchrec"


@dataclass(frozen=True)
class Call:
    """A call of one of TorchRec's names.

    Attributes:
        path: the name with its module.
        line: of the call.
        positional: number of positional arguments; None if one is starred.
        keywords: names of keyword arguments.
    """

    path: str
    line: int
    positional: int | None
    keywords: tuple[str, ...]


@dataclass
class ScriptNames(ast.NodeVisitor):
    """Collects names: ``ScriptNames().visit(tree)``.

    Attributes:
        aliases: name in the script -> path in TorchRec.
        lines: path of a module or name -> lines that import it or read it from a module.
        members: (path of a name, attribute that is read from it) -> lines.
        calls: of names and of their members.
    """

    aliases: dict[str, str] = field(default_factory=dict)
    lines: dict[str, list[int]] = field(default_factory=dict)
    members: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    def path_of(self, node: ast.AST) -> str | None:
        """The path of an expression such as ``torchrec.PoolingType``; None for another expression."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.path_of(node.value)
            return f"{base}.{node.attr}" if base in modules() else None
        return None

    def visit_Import(self, node: ast.Import) -> None:
        """``import torchrec.a as b``."""
        for alias in node.names:
            if alias.name.partition(".")[0] == ROOT:
                self.aliases[alias.asname or ROOT] = alias.name if alias.asname else ROOT
                self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """``from torchrec.a import b as c``."""
        if node.level or node.module is None or node.module.partition(".")[0] != ROOT:
            return
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            self.aliases[alias.asname or alias.name] = path
            self._add(path, alias.lineno)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """``torchrec.a.b``, and ``b.member`` of an imported name."""
        path = self.path_of(node)
        if path is None:
            owner = self.path_of(node.value)
            if owner is not None:
                self.members.setdefault((owner, node.attr), []).append(node.lineno)
            self.visit(node.value)
        elif path not in modules():
            self._add(path, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        """``name(...)`` and ``name.member(...)``."""
        path = self.path_of(node.func)
        if path is None and isinstance(node.func, ast.Attribute):
            owner = self.path_of(node.func.value)
            path = owner and f"{owner}.{node.func.attr}"
        if path is not None:
            starred = any(isinstance(argument, ast.Starred) for argument in node.args)
            keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
            self.calls.append(Call(path, node.lineno, None if starred else len(node.args), keywords))
        self.generic_visit(node)

    def _add(self, path: str, line: int) -> None:
        self.lines.setdefault(path, []).append(line)


def names_in(tree: ast.AST) -> ScriptNames:
    """The names of a parsed script. Imports inside functions count for the whole script.

    >>> names_in(ast.parse("import torchrec as tr\\nx = tr.JaggedTensor.empty()")).lines
    {'torchrec': [1], 'torchrec.JaggedTensor': [2]}
    """
    found = ScriptNames()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.visit(node)
    found.lines.clear()  # the second walk counts each import once
    found.visit(tree)
    return found


@lru_cache(maxsize=1)
def modules() -> frozenset[str]:
    """TorchRec's modules and their packages."""
    paths = {*PUBLIC, *served_modules()}
    return frozenset(".".join(path.split(".")[: depth + 1]) for path in paths for depth in range(path.count(".") + 1))


def served_object(path: str) -> Any:
    """The object here for a name of TorchRec.

    Raises:
        KeyError: the name is not served.
    """
    module, _, name = path.rpartition(".")
    target = target_of(module, name)
    if target is None:
        raise KeyError(path)
    room, _, own = target.partition(":")
    return getattr(import_module(room), own)

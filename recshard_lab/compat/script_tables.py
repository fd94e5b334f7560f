"""The tables that a script for TorchRec declares, as far as their sizes are constants of its text.

A small interpreter computes constants: literals, arithmetic, loops, comprehensions, functions and classes of the
script, defaults of parameters, of ``argparse`` and of environment variables. It calls nothing else, so that reading a
script has no effects.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from recshard_lab.compat.refusals import refused, refused_values
from recshard_lab.compat.script_names import ScriptNames, served_object

MOST_STATEMENTS = 100_000
MOST_ENTRIES = 100_000
_DEEPEST = 20

_TABLES = {"EmbeddingBagConfig", "EmbeddingConfig"}
_SCHEMES = {"column_wise", "data_parallel", "grid_shard", "row_wise", "table_row_wise", "table_wise"}
_FIELDS = ("num_embeddings", "embedding_dim", "name")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.LShift: operator.lshift,
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b, ast.BitOr: operator.or_,
}  # fmt: skip
_BUILTINS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (abs, bool, dict, enumerate, float, int, len, list, max, min, range, round, set, sorted, str, sum,
                     tuple, zip)
}  # fmt: skip
_METHODS: dict[type, set[str]] = {
    str: {"format", "join", "lower", "upper", "split", "strip", "replace", "startswith", "endswith"},
    list: {"append", "extend", "copy", "index", "count"},
    dict: {"items", "keys", "values", "get", "copy", "update"},
    tuple: {"index", "count"},
}


@dataclass(frozen=True)
class DeclaredTable:
    """A table of a script.

    Attributes:
        line: of its config.
        config: the config, of this library's class.
    """

    line: int
    config: Any


@dataclass(frozen=True)
class UnreadTable:
    """A config whose size is known only when the script runs.

    Attributes:
        line: of the config.
        argument: the first argument that is not a constant.
        expression: its text in the script.
    """

    line: int
    argument: str
    expression: str


@dataclass(frozen=True)
class RefusedValue:
    """A constant argument that this library has, with a value that it refuses.

    Attributes:
        line: of the call.
        path: of the called name.
        argument: its name.
        reason: a sentence with the value, the reason and the fix.
    """

    line: int
    path: str
    argument: str
    reason: str


@dataclass
class ScriptTables:
    """What a script declares.

    Attributes:
        tables: with constant sizes.
        unread: the others.
        schemes: table -> sharding types that a planner's constraints or a module's plan allow.
        refused: constant arguments of TorchRec's names that this library refuses.
    """

    tables: list[DeclaredTable] = field(default_factory=list)
    unread: list[UnreadTable] = field(default_factory=list)
    schemes: dict[str, list[str]] = field(default_factory=dict)
    refused: list[RefusedValue] = field(default_factory=list)


def tables_in(tree: ast.Module, names: ScriptNames, values: Mapping[str, Any] | None = None) -> ScriptTables:
    """The tables of a parsed script.

    Args:
        tree: the script.
        names: its names of TorchRec.
        values: expression of the script, such as ``"args.rows"`` -> its value.

    >>> from recshard_lab.compat.script_names import names_in
    >>> tree = ast.parse("import torchrec as t\\n[t.EmbeddingConfig(10**i, 8, name=f't{i}') for i in range(1, 3)]")
    >>> [(table.config.name, table.config.num_embeddings) for table in tables_in(tree, names_in(tree)).tables]
    [('t1', 10), ('t2', 100)]
    """
    reader = _Reader(names, dict(values or {}))
    reader.run(tree)
    found = reader.found
    read = {table.line for table in found.tables}
    found.unread = [entry for entry in dict.fromkeys(found.unread) if entry.line not in read]
    return found


class _Unknown:
    """The value of an expression that is not a constant."""


_UNKNOWN = _Unknown()
_Scope = dict[str, Any]


@dataclass(eq=False)
class _Function:
    """A function or class of the script."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    scope: _Scope
    called: bool = False


class _Arguments:
    """What ``parser.parse_args()`` returns."""


class _Instance:
    """An object of a class of the script."""


@dataclass(frozen=True)
class _Schemes:
    """Sharding types of one table."""

    allowed: tuple[str, ...]


class _Return(Exception):
    """A return statement, with its value."""


class _Stop(Exception):
    """A break or continue."""


class _Reader:
    def __init__(self, names: ScriptNames, values: dict[str, Any]) -> None:
        self.names, self.values, self.found = names, values, ScriptTables()
        self.functions: list[_Function] = []
        self.defaults: dict[str, Any] = {}
        self.attributes: dict[str, Any] = {}
        self.left, self.depth = MOST_STATEMENTS, 0

    def run(self, tree: ast.Module) -> None:
        """Executes the script, then each function that it does not call, with the defaults of its parameters."""
        self._block(tree.body, {"__name__": "__main__"})
        for function in self.functions:  # grows
            if not function.called:
                self._call_function(function, [], {})

    # ---- statements ----

    def _block(self, body: Iterable[ast.stmt], scope: _Scope) -> None:
        for statement in body:
            self.left -= 1
            if self.left < 0:
                return
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: _Scope) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                result = self.value(value, scope)
                for target in targets:
                    self._bind(target, result, scope)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._bind(target, self.value(value, scope), scope)
            case ast.AugAssign(target=target, op=op, value=value):
                self._bind(target, self._apply(op, self.value(target, scope), self.value(value, scope)), scope)
            case ast.For(target=target, iter=source, body=body, orelse=rest):
                self._loop(target, self._entries(self.value(source, scope)), body, scope)
                self._block(rest, scope)
            case ast.While(body=body, orelse=rest):
                self._loop(None, None, body, scope)
                self._block(rest, scope)
            case ast.If(test=test, body=body, orelse=rest):
                known = self.value(test, scope)
                if known is _UNKNOWN or known:
                    self._block(body, scope)
                if known is _UNKNOWN or not known:
                    self._block(rest, scope)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    result = self.value(item.context_expr, scope)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, result, scope)
                self._block(body, scope)
            case ast.Try(body=body, orelse=rest, finalbody=final):
                self._block([*body, *rest, *final], scope)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                scope[name] = self._define(node, scope)
            case ast.Return(value=value):
                raise _Return(None if value is None else self.value(value, scope))
            case ast.Expr(value=value):
                self.value(value, scope)
            case ast.Break() | ast.Continue():
                raise _Stop(isinstance(node, ast.Break))

    def _define(self, node: Any, scope: _Scope) -> _Function:
        function = _Function(node, scope)
        self.functions.append(function)
        return function

    def _loop(self, target: ast.expr | None, entries: list[Any] | None, body: list[ast.stmt], scope: _Scope) -> None:
        for entry in [_UNKNOWN] if entries is None else entries:
            if target is not None:
                self._bind(target, entry, scope)
            try:
                self._block(body, scope)
            except _Stop as stop:
                if stop.args[0]:
                    return

    def _bind(self, target: ast.expr, value: Any, scope: _Scope) -> None:
        match target:
            case ast.Name(id=name):
                scope[name] = value
            case ast.Attribute():
                self.attributes[ast.unparse(target)] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = self._entries(value)
                if values is None or len(values) != len(parts):
                    values = [_UNKNOWN] * len(parts)
                for part, entry in zip(parts, values, strict=True):
                    self._bind(part, entry, scope)
            case ast.Subscript(value=owner, slice=index):
                container, key = self.value(owner, scope), self.value(index, scope)
                if isinstance(container, dict | list) and key is not _UNKNOWN:
                    self._try(container.__setitem__, key, value)

    # ---- expressions ----

    def value(self, node: ast.expr, scope: _Scope) -> Any:
        """The value of an expression; `_UNKNOWN` if it is not a constant."""
        if self.values and (text := ast.unparse(node)) in self.values:
            return self.values[text]
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return scope[name] if name in scope else self._of_torchrec(node)
            case ast.Attribute():
                return self._attribute(node, scope)
            case ast.List() | ast.Tuple() | ast.Set():
                kind = {ast.List: list, ast.Tuple: tuple, ast.Set: list}[type(node)]
                entries = self._all(node.elts, scope)
                return _UNKNOWN if entries is None else kind(entries)
            case ast.Dict(keys=keys, values=values):
                return self._dict(keys, values, scope)
            case ast.BinOp(left=left, op=op, right=right):
                return self._apply(op, self.value(left, scope), self.value(right, scope))
            case ast.UnaryOp(op=op, operand=operand):
                return self._apply(op, self.value(operand, scope))
            case ast.BoolOp(op=op, values=values):
                return self._bool(isinstance(op, ast.And), [self.value(part, scope) for part in values])
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._apply(op, self.value(left, scope), self.value(right, scope))
            case ast.IfExp(test=test, body=body, orelse=rest):
                known = self.value(test, scope)
                return known if known is _UNKNOWN else self.value(body if known else rest, scope)
            case ast.JoinedStr(values=values):
                parts = [self.value(part, scope) for part in values]
                return _UNKNOWN if _UNKNOWN in parts else "".join(map(str, parts))
            case ast.FormattedValue(value=value, format_spec=None):
                return self.value(value, scope)
            case ast.ListComp(elt=elt) | ast.GeneratorExp(elt=elt) | ast.SetComp(elt=elt):
                found: list[Any] = []
                known = self._comprehend(node.generators, dict(scope), lambda s: found.append(self.value(elt, s)))
                return found if known else _UNKNOWN
            case ast.DictComp(key=key, value=value):
                pairs: list[tuple[Any, Any]] = []
                known = self._comprehend(
                    node.generators, dict(scope), lambda s: pairs.append((self.value(key, s), self.value(value, s)))
                )
                return self._try(dict, pairs) if known and all(k is not _UNKNOWN for k, _ in pairs) else _UNKNOWN
            case ast.Subscript(value=owner, slice=index):
                return self._item(self.value(owner, scope), self.value(index, scope))
            case ast.Slice():
                bounds = [None if b is None else self.value(b, scope) for b in (node.lower, node.upper, node.step)]
                return _UNKNOWN if _UNKNOWN in bounds else slice(*bounds)
            case ast.Call():
                return self._call(node, scope)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, scope)
        return _UNKNOWN

    def _of_torchrec(self, node: ast.expr) -> Any:
        """A constant or an enumeration of TorchRec."""
        path = self.names.path_of(node)
        try:
            value = None if path is None else served_object(path)
        except KeyError:
            return _UNKNOWN
        simple = isinstance(value, str | int | float | list | tuple | dict) or (
            isinstance(value, type) and issubclass(value, Enum)
        )
        return value if simple else _UNKNOWN

    def _attribute(self, node: ast.Attribute, scope: _Scope) -> Any:
        if (text := ast.unparse(node)) in self.attributes:
            return self.attributes[text]
        if self.names.path_of(node) is not None:
            return self._of_torchrec(node)
        owner = self.value(node.value, scope)
        if isinstance(owner, _Arguments):
            return self.defaults.get(node.attr, _UNKNOWN)
        is_enum = isinstance(owner, Enum) or (isinstance(owner, type) and issubclass(owner, Enum))
        is_config = any(owner is table.config for table in self.found.tables)
        return getattr(owner, node.attr, _UNKNOWN) if is_enum or is_config else _UNKNOWN

    def _dict(self, keys: list[ast.expr | None], values: list[ast.expr], scope: _Scope) -> Any:
        found: dict[Any, Any] = {}
        for key, value in zip(keys, values, strict=True):
            held = self.value(value, scope)
            if key is None and isinstance(held, dict):
                found |= held
                continue
            name = _UNKNOWN if key is None else self.value(key, scope)
            if name is _UNKNOWN or self._try(hash, name) is _UNKNOWN:
                return _UNKNOWN
            found[name] = held
        return found

    def _bool(self, conjunction: bool, parts: list[Any]) -> Any:
        for part in parts:
            if part is _UNKNOWN or bool(part) != conjunction:
                return part
        return parts[-1]

    def _comprehend(self, generators: list[ast.comprehension], scope: _Scope, add: Callable[[_Scope], None]) -> bool:
        """Whether the entries are known; `add` is called for each of them."""
        if not generators:
            add(scope)
            return True
        first, *rest = generators
        entries = self._entries(self.value(first.iter, scope))
        known = entries is not None
        for entry in [_UNKNOWN] if entries is None else entries:
            self.left -= 1
            if self.left < 0:
                return False
            self._bind(first.target, entry, scope)
            tests = [self.value(test, scope) for test in first.ifs]
            known = known and not any(test is _UNKNOWN for test in tests)
            if all(test is _UNKNOWN or test for test in tests):
                known = self._comprehend(rest, scope, add) and known
        return known

    def _all(self, nodes: list[ast.expr], scope: _Scope) -> list[Any] | None:
        """Values of a list, starred ones unpacked; None if a starred one is unknown."""
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                entries = self._entries(self.value(node.value, scope))
                if entries is None:
                    return None
                found += entries
            else:
                found.append(self.value(node, scope))
        return found

    def _entries(self, value: Any) -> list[Any] | None:
        if not isinstance(value, list | tuple | dict | range | str | set | enumerate | zip | type({}.items())):
            return None if not isinstance(value, type({}.keys()) | type({}.values())) else list(value)
        if isinstance(value, range) and len(value) > MOST_ENTRIES:
            return None
        return list(value)

    def _apply(self, op: ast.AST, *operands: Any) -> Any:
        if any(operand is _UNKNOWN for operand in operands):
            return _UNKNOWN
        if type(op) not in _OPERATORS or not _is_small(op, operands):
            return _UNKNOWN
        return self._try(_OPERATORS[type(op)], *operands)

    def _item(self, owner: Any, index: Any) -> Any:
        return _UNKNOWN if _UNKNOWN in (owner, index) else self._try(operator.getitem, owner, index)

    def _try(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except Exception:  # the script would raise it
            return _UNKNOWN

    # ---- calls ----

    def _call(self, node: ast.Call, scope: _Scope) -> Any:
        arguments = self._all(node.args, scope)
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            held = self.value(keyword.value, scope)
            keywords |= {keyword.arg: held} if keyword.arg is not None else (held if isinstance(held, dict) else {})
        path = self.names.path_of(node.func)
        if path is not None:
            self._find_refused(path, node, arguments or [], keywords)
            return self._call_torchrec(path.rpartition(".")[2], node, arguments or [], keywords)
        if arguments is None:
            return _UNKNOWN
        if isinstance(node.func, ast.Attribute):
            return self._call_method(node.func, arguments, keywords, scope)
        function = self.value(node.func, scope)
        if isinstance(function, _Function):
            return self._call_function(function, arguments, keywords)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        known = all(each is not _UNKNOWN for each in [*arguments, *keywords.values()])
        sized = all(not isinstance(each, range) or len(each) <= MOST_ENTRIES for each in arguments)
        if name in _BUILTINS and function is _UNKNOWN and known and (sized or name == "len"):
            return self._try(_BUILTINS[name], *arguments, **keywords)
        return _UNKNOWN

    def _call_method(self, func: ast.Attribute, arguments: list[Any], keywords: dict[str, Any], scope: _Scope) -> Any:
        if func.attr == "add_argument":
            self._add_argument(arguments, keywords)
            return _UNKNOWN
        if func.attr in ("parse_args", "parse_known_args"):
            return _Arguments() if func.attr == "parse_args" else (_Arguments(), _UNKNOWN)
        if ast.unparse(func) in ("os.environ.get", "os.getenv"):
            return arguments[1] if len(arguments) > 1 else _UNKNOWN
        owner = self.value(func.value, scope)
        if func.attr in _METHODS.get(type(owner), ()):
            return self._try(getattr(owner, func.attr), *arguments, **keywords)
        return _UNKNOWN

    def _add_argument(self, names: list[Any], keywords: dict[str, Any]) -> None:
        long = [name for name in names if isinstance(name, str) and name.startswith("--")] or names[:1]
        name = keywords.get("dest") or (long[0] if long else "")
        if isinstance(name, str) and "default" in keywords:
            self.defaults[name.lstrip("-").replace("-", "_")] = keywords["default"]

    def _call_function(self, function: _Function, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        function.called = True
        if self.depth >= _DEEPEST:
            return _UNKNOWN
        self.depth += 1
        try:
            if isinstance(function.node, ast.ClassDef):
                return self._call_class(function, arguments, keywords)
            scope = dict(function.scope) | self._parameters(function, arguments, keywords)
            self._block(function.node.body, scope)
        except _Return as result:
            return result.args[0]
        finally:
            self.depth -= 1
        return None

    def _call_class(self, function: _Function, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        scope = dict(function.scope)
        self._block(function.node.body, scope)
        made = _Instance()
        if isinstance(init := scope.get("__init__"), _Function):
            self._call_function(init, [made, *arguments], keywords)
        return made

    def _parameters(self, function: _Function, arguments: list[Any], keywords: dict[str, Any]) -> _Scope:
        """The scope of a call: arguments, and defaults for the others."""
        spec: ast.arguments = function.node.args  # type: ignore[union-attr]
        names = [each.arg for each in [*spec.posonlyargs, *spec.args]]
        scope: _Scope = dict.fromkeys([*names, *(each.arg for each in spec.kwonlyargs)], _UNKNOWN)
        for name, default in zip(reversed(names), reversed(spec.defaults), strict=False):
            scope[name] = self.value(default, function.scope)
        for each, own in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
            if own is not None:
                scope[each.arg] = self.value(own, function.scope)
        scope |= dict(zip(names, arguments, strict=False))
        return scope | {name: value for name, value in keywords.items() if name in scope}

    def _find_refused(self, path: str, node: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> None:
        called = self._try(served_object, path)
        if not (refusals := refused_values(called)):
            return
        values = dict(zip(inspect.signature(called).parameters, arguments, strict=False)) | keywords
        known = {name: value for name, value in values.items() if value is not _UNKNOWN}
        if (found := refused(refusals, known)) is not None:
            self.found.refused.append(RefusedValue(node.lineno, path, *found))

    def _call_torchrec(self, name: str, node: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if name in _TABLES:
            return self._table(name, node, arguments, keywords)
        if name in _SCHEMES:
            return _Schemes((name,))
        if name == "ParameterConstraints":
            types = keywords.get("sharding_types", arguments[0] if arguments else _UNKNOWN)
            allowed = [t.value if isinstance(t, Enum) else t for t in self._entries(types) or []]
            return _Schemes(tuple(allowed)) if allowed and _UNKNOWN not in allowed else _UNKNOWN
        requests = keywords.get("constraints") if name == "EmbeddingShardingPlanner" else None
        if name == "construct_module_sharding_plan":
            requests = keywords.get("per_param_sharding", arguments[1] if len(arguments) > 1 else None)
        if isinstance(requests, dict):
            self.found.schemes |= {
                table: list(entry.allowed) for table, entry in requests.items() if isinstance(entry, _Schemes)
            }
        return _UNKNOWN

    def _table(self, name: str, node: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        values = dict(zip(_FIELDS, arguments, strict=False)) | keywords
        texts = dict(zip(_FIELDS, map(ast.unparse, node.args), strict=False))
        texts |= {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        for argument in _FIELDS:
            kind = str if argument == "name" else int
            if not isinstance(values.get(argument), kind):
                text = texts.get(argument, "missing")
                self.found.unread.append(UnreadTable(node.lineno, argument, text))
                return _UNKNOWN
        kept = {argument: values[argument] for argument in _FIELDS}
        features = self._entries(values.get("feature_names"))
        kept["feature_names"] = features if features and _UNKNOWN not in features else [values["name"]]
        for optional in ("pooling", "data_type"):
            if values.get(optional, _UNKNOWN) is not _UNKNOWN and name == "EmbeddingBagConfig":
                kept[optional] = values[optional]
        config = self._try(served_object(f"torchrec.modules.embedding_configs.{name}"), **kept)
        same = (table.config for table in self.found.tables if table.line == node.lineno)
        if config is not _UNKNOWN and config not in same:
            self.found.tables.append(DeclaredTable(node.lineno, config))
        return config


def _is_small(op: ast.AST, operands: tuple[Any, ...]) -> bool:
    """Whether the result of an operator is small enough to compute."""
    left, right = (*operands, None)[:2]
    if isinstance(op, ast.Pow | ast.LShift):
        return isinstance(left, int | float) and isinstance(right, int | float) and abs(right) <= 64 and left < 2**32
    if isinstance(op, ast.Mult) and not all(isinstance(each, int | float) for each in operands):
        sizes = [len(each) if isinstance(each, str | list | tuple) else each for each in operands]
        return all(isinstance(size, int) for size in sizes) and sizes[0] * sizes[1] <= MOST_ENTRIES
    return True

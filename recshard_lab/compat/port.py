"""What a script for TorchRec meets here: names, arguments, tables and a plan. Reads the script without running it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import EnumMeta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recshard_lab.arguments import checks_arguments
from recshard_lab.compat.difference_list import differences_of
from recshard_lab.compat.not_served import explain
from recshard_lab.compat.script_names import ScriptNames, modules, names_in, served_object
from recshard_lab.compat.script_tables import DeclaredTable, ScriptTables, UnreadTable, tables_in
from recshard_lab.compat.served import served_modules, target_of
from recshard_lab.compat.translate import script_source, translated
from recshard_lab.text_table import Printable, TextTable

if TYPE_CHECKING:
    from recshard_lab.sharding import ShardingPlan, Topology

SERVED, DIFFERS, REFUSED = "served", "differs", "refused"
_NO_GPUS = 2**20
"""More ranks than a machine has GPUs: `translated` then changes every line that needs one."""


@dataclass(frozen=True)
class Finding:
    """One name, attribute or call of a script.

    Attributes:
        lines: where the script has it.
        name: TorchRec's, with its module. For a call: ``name(argument=)``.
        verdict: "served", "differs" or "refused".
        note: the name here, what differs, or the reason and what is nearest.
    """

    lines: tuple[int, ...]
    name: str
    verdict: str
    note: str


@dataclass(frozen=True)
class PortReport(Printable):
    """What `read_script` found; `print` it.

    Attributes:
        script: its path.
        findings: in the order of their first lines.
        device_lines: lines that need CUDA or NCCL. ``--translate`` changes them.
        tables: with sizes that the text of the script has.
        unread: tables whose sizes are known only when the script runs.
        schemes: table -> sharding types that the script allows.
    """

    script: str
    findings: tuple[Finding, ...]
    device_lines: tuple[int, ...]
    tables: tuple[DeclaredTable, ...]
    unread: tuple[UnreadTable, ...]
    schemes: Mapping[str, Sequence[str]]

    def of(self, verdict: str) -> list[Finding]:
        """The findings with one verdict."""
        return [finding for finding in self.findings if finding.verdict == verdict]

    def parts(self) -> list[str | TextTable]:
        """A sentence, a table for each verdict, and the tables that the script declares."""
        count = {verdict: len(self.of(verdict)) for verdict in (SERVED, DIFFERS, REFUSED)}
        shown: list[str | TextTable] = [
            f"{self.script}, names of TorchRec: {count[SERVED]} are served, {count[DIFFERS]} differ, "
            f"{count[REFUSED]} are refused."
        ]
        for verdict, head in ((REFUSED, "reason"), (DIFFERS, "difference"), (SERVED, "here")):
            rows = [(_numbers(entry.lines), _short(entry.name), entry.note) for entry in self.of(verdict)]
            shown.append(TextTable(("line", verdict, head), rows))
        if self.device_lines:
            shown.append(f"--translate runs these lines without GPUs: {_numbers(self.device_lines)}.")
        for entry in self.unread:
            shown.append(
                f"Line {entry.line}: the {entry.argument} of this table is {entry.expression}, which is known only "
                f"when the script runs. Fix: --set '{entry.expression}=VALUE'."
            )
        shown.append(
            TextTable(("line", "table", "rows", "columns", "sharding types"), self._table_rows(), right=(2, 3))
        )
        if not self.tables and not self.unread:
            shown.append("The script declares no table.")
        return shown

    @property
    def command(self) -> str:
        """The command that runs the script."""
        translate = " --translate" if self.device_lines else ""
        return f"python -m recshard_lab.compat{translate} {self.script}"

    def records(self) -> list[dict[str, Any]]:
        """One dict per finding."""
        return [asdict(finding) for finding in self.findings]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "script": self.script,
            "findings": self.records(),
            "device_lines": list(self.device_lines),
            "tables": [
                {
                    "line": table.line,
                    "name": table.config.name,
                    "num_embeddings": table.config.num_embeddings,
                    "embedding_dim": table.config.embedding_dim,
                    "sharding_types": list(self.schemes.get(table.config.name, ())),
                }
                for table in self.tables
            ],
            "unread": [asdict(entry) for entry in self.unread],
        }

    def plan(self, topology: Topology | int = 2) -> ShardingPlan:
        """The plan that the script's tables get here, under the sharding types that the script allows.

        Args:
            topology: the machine, or a number of CPU ranks.

        Raises:
            PlanError: the script declares no table that can be read, or they do not fit.
        """
        from recshard_lab.planner import plan
        from recshard_lab.sharding import PlanError

        if not self.tables:
            raise PlanError(
                f"{self.script} has no table whose size is a constant: there is nothing to plan. Fix: pass the "
                f"sizes, as --set 'num_embeddings=1000'"
            )
        groups: list[dict[str, Any]] = [{}]
        for table in self.tables:  # two collections may have tables of one name
            group = next((each for each in groups if table.config.name not in each), None)
            if group is None:
                groups.append(group := {})
            group[table.config.name] = table.config
        by_module = {f"collection_{n}" if n else "": list(group.values()) for n, group in enumerate(groups)}
        allowed = {name: list(types) for name, types in self.schemes.items() if any(name in group for group in groups)}
        return plan(by_module, topology, constraints=allowed)

    def _table_rows(self) -> list[tuple[str, ...]]:
        return [
            (
                str(table.line),
                table.config.name,
                f"{table.config.num_embeddings:,}",
                f"{table.config.embedding_dim:,}",
                ", ".join(self.schemes.get(table.config.name, ())) or "any",
            )
            for table in self.tables
        ]


@checks_arguments
def read_script(path: str | Path, values: Mapping[str, Any] | None = None) -> PortReport:
    """Reads a script for TorchRec without running it, and reports what is served, differs or is refused here.

    It sees names that the script imports or reads from a module, attributes of served classes, arguments of served
    functions and classes, and tables whose sizes are constants: literals, arithmetic, loops, functions of the script,
    defaults of parameters and of argparse.

    Args:
        path: a Python script, or a notebook (``.ipynb``).
        values: expression of the script -> its value, such as ``{"args.rows": 1000}``.

    Raises:
        ValueError: the file is not valid Python, or not UTF-8.
        OSError: it cannot be read.

    >>> from tempfile import mkdtemp
    >>> script = Path(mkdtemp()) / "train.py"
    >>> _ = script.write_text(
    ...     "import torchrec\\n"
    ...     "table = torchrec.EmbeddingBagConfig(100, 8, name='film', feature_names=['f'])\\n"
    ... )
    >>> report = read_script(script)
    >>> [(finding.name, finding.verdict) for finding in report.findings]
    [('torchrec', 'served'), ('torchrec.EmbeddingBagConfig', 'served')]
    >>> list(report.plan(2).tables())
    ['film']
    """
    text = script_source(Path(path))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ValueError(
            f"{path}{f', line {line}' if line else ''}: {getattr(error, 'msg', error)}: this is not valid Python "
            f"3. Fix: correct the line"
        ) from None
    names = names_in(tree)
    pairs = zip(text.splitlines(), translated(text, world_size=_NO_GPUS).splitlines(), strict=True)
    device_lines = tuple(number for number, (old, new) in enumerate(pairs, 1) if old != new)
    declared: ScriptTables = tables_in(tree, names, values)
    found = [*_names(names), *_members(names), *_arguments(names), *_values(declared)]
    return PortReport(
        str(path),
        tuple(sorted(found, key=lambda finding: finding.lines[0])),
        device_lines,
        tuple(declared.tables),
        tuple(declared.unread),
        declared.schemes,
    )


def _names(names: ScriptNames) -> list[Finding]:
    """Modules and names."""
    found = []
    for path, lines in names.lines.items():
        where = tuple(dict.fromkeys(lines))
        module, _, name = path.rpartition(".")
        if path in served_modules():
            found.append(Finding(where, path, SERVED, "module"))
        elif name == "*" and module in served_modules():
            known = len(served_modules()[module])
            found.append(Finding(where, path, DIFFERS, f"gives the {known} names that are served"))
        elif (target := target_of(module, name)) is None:
            found.append(Finding(where, path, REFUSED, _reason(path)))
        elif differing := differences_of(name):
            found.append(Finding(where, path, DIFFERS, "; ".join(map(str, differing))))
        else:
            found.append(Finding(where, path, SERVED, target.replace(":", ".")))
    return found


def _members(names: ScriptNames) -> list[Finding]:
    """Attributes of served classes that the classes here lack."""
    found = []
    for (path, member), lines in names.members.items():
        if path not in modules() and target_of(*_split(path)) is not None:
            owner = served_object(path)
            if isinstance(owner, type) and not hasattr(owner, member):
                note = f"{owner.__name__} here has no attribute {member}"
                found.append(Finding(tuple(dict.fromkeys(lines)), f"{path}.{member}", REFUSED, note))
    return found


def _arguments(names: ScriptNames) -> list[Finding]:
    """Arguments of calls that the signatures here do not have."""
    found: dict[tuple[str, str], list[int]] = {}
    for call in names.calls:
        signature = _signature(call.path)
        if signature is None:
            continue
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            for keyword in call.keywords:
                if keyword not in signature.parameters:
                    found.setdefault((f"{call.path}({keyword}=)", "does not accept it"), []).append(call.line)
        positional = sum(kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD) for kind in kinds)
        if inspect.Parameter.VAR_POSITIONAL not in kinds and (call.positional or 0) > positional:
            note = f"takes at most {positional} positional arguments, not {call.positional}"
            found.setdefault((f"{call.path}()", note), []).append(call.line)
    return [
        Finding(tuple(lines), name, REFUSED, f"{_short(name).partition('(')[0]} here {note}")
        for (name, note), lines in found.items()
    ]


def _values(declared: ScriptTables) -> list[Finding]:
    """Arguments of calls whose constant values are refused here."""
    lines: dict[tuple[str, str], list[int]] = {}
    for entry in dict.fromkeys(declared.refused):
        lines.setdefault((f"{entry.path}({entry.argument}=)", entry.reason), []).append(entry.line)
    return [Finding(tuple(where), name, REFUSED, reason) for (name, reason), where in lines.items()]


def _signature(path: str) -> inspect.Signature | None:
    """The signature of a served class, function or method; None if there is none to compare with."""
    module, name = _split(path)
    try:
        if target_of(module, name) is not None:
            called = served_object(path)
        elif target_of(*_split(module)) is not None:
            owner = served_object(module)
            called = getattr(owner, name)
            if not isinstance(inspect.getattr_static(owner, name), classmethod | staticmethod):
                return None  # of an instance: a call by the class passes `self`
        else:
            return None
        return None if isinstance(called, EnumMeta) else inspect.signature(called)
    except (AttributeError, ValueError, TypeError):
        return None


def _split(path: str) -> tuple[str, str]:
    module, _, name = path.rpartition(".")
    return module, name


def _reason(path: str) -> str:
    return explain(path).removeprefix(f"recshard_lab does not serve {path}").strip(" :.")


def _short(name: str) -> str:
    """Without ``torchrec.``.

    >>> _short("torchrec.modules.mlp.MLP")
    'modules.mlp.MLP'
    """
    return name.removeprefix("torchrec.")


def _numbers(lines: Sequence[int]) -> str:
    return ", ".join(map(str, lines))

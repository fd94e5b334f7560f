"""Forty mutants that a seed draws: faults that no author of a test chose.

``python -m tests.mutants.drawn`` lists them. With a folder of coverage data, ``python -m tests.mutants.drawn FOLDER``
runs each against the test files that cover its line. FOLDER has one file of coverage.py for each test file, named
after it: ``tests%planner%test_planner.py.cov``.
"""

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.running import ROOT, Copy

SEED, COUNT = 20261128, 40
SWAPS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: (" in ", " not in "),
    ast.Is: (" is ", " is not "),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.And: (" and ", " or "),
    ast.Or: (" or ", " and "),
}


def mutants() -> list[tuple[str, int, str]]:
    """File, line and the mutated line of each, in order."""
    sites = [
        (str(path.relative_to(ROOT)), *site)
        for path in sorted((ROOT / "recshard_lab").rglob("*.py"))
        for site in sorted(set(_sites(path.read_text())))
    ]
    return sorted(random.Random(SEED).sample(sites, COUNT))


def _sites(text: str) -> Iterator[tuple[int, str]]:
    """Every line of a function that one swap changes, and the line after it. Errors and annotations have none."""
    lines = text.splitlines()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in _nodes(statement):
                    yield from _swapped(node, lines)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise | ast.FunctionDef | ast.ClassDef | ast.JoinedStr):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def _swapped(node: ast.AST, lines: list[str]) -> Iterator[tuple[int, str]]:
    def between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[tuple[int, str]]:
        if left.end_lineno == right.lineno and left.end_col_offset is not None:
            line = lines[right.lineno - 1]
            begin, end = left.end_col_offset, right.col_offset  # of bytes: equal to characters in lines of ASCII
            if line.isascii() and line[begin:end].count(old) == 1:
                yield right.lineno, line[:begin] + line[begin:end].replace(old, new) + line[end:]

    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield from between(node.left, node.comparators[0], *SWAPS[type(node.ops[0])])
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield from between(node.left, node.right, *SWAPS[type(node.op)])
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from between(left, right, *SWAPS[type(node.op)])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and node.lineno == node.operand.end_lineno:
        line = lines[node.lineno - 1]
        yield node.lineno, line[: node.col_offset] + line[node.operand.col_offset :]
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.lineno == node.end_lineno:
        line = lines[node.lineno - 1]
        if line.isascii():
            yield node.lineno, line[: node.col_offset] + str(node.value + 1) + line[node.end_col_offset :]
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        line = lines[node.lineno - 1]
        if line.isascii():
            yield node.lineno, line[: node.col_offset] + str(not node.value) + line[node.end_col_offset :]


def covering(folder: Path, file: str, line: int) -> list[str]:
    """The test files that run the line, those of the same room first."""
    from coverage import CoverageData

    found = []
    for data_file in sorted(folder.glob("*.cov")):
        data = CoverageData(str(data_file))
        data.read()
        if any(name.endswith(file) and line in (data.lines(name) or ()) for name in data.measured_files()):
            found.append(data_file.name.removesuffix(".cov").replace("%", "/"))
    room = file.split("/")[1]
    return sorted((name for name in found if (ROOT / name).exists()), key=lambda name: (f"/{room}/" not in name, name))


def main(arguments: list[str]) -> int:
    """0 if every mutant whose line a test runs was killed."""
    drawn = mutants()
    if not arguments:
        for file, line, text in drawn:
            print(f"{file}:{line}: {text.strip()}")
        return 0
    killed = 0
    with Copy() as copy:
        for file, line, text in drawn:
            tests = covering(Path(arguments[0]), file, line)
            lines = (ROOT / file).read_text().splitlines(keepends=True)
            lines[line - 1] = text + "\n"
            words = copy.judged(file, "".join(lines), tests) if tests else "NOT RUN by any test"
            killed += words.startswith("killed")
            print(f"{file}:{line}: {text.strip()}\n    {len(tests)} files run it. {words}", flush=True)
    print(f"{len(drawn)} mutants: {killed} killed, {len(drawn) - killed} not")
    return int(killed < len(drawn))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""How much of TorchRec's public API is served, how many parity cases agree, and what ``import torchrec`` costs.

A name *differs* if `recshard_lab.compat.differences` lists it, and is *refused* if its import raises an error with a
reason. Parity cases run here, and are compared with the stored results of TorchRec 1.8 (`tests/compat/parity`).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from statistics import median

from benchmarks import Figure, note, seconds_in_new_python
from recshard_lab.compat.coverage_table import coverage
from recshard_lab.compat.difference_list import differences_of
from recshard_lab.compat.not_served import reason_of

ROUNDS, QUICK_ROUNDS = 9, 3
SERVED = "public names of TorchRec 1.8 that are served"
NO_REASON = "refused names without a reason"
CASES = "parity cases that agree"
DISAGREE = "parity cases that disagree, or fail"
IMPORT = "import torchrec through compat, beyond import torch"
TARGETS = {SERVED: 560.0, NO_REASON: 0.0, CASES: 300.0, DISAGREE: 0.0, IMPORT: 0.4}

_IMPORT = """
import sys, time, torch
before = set(sys.modules)
begun = time.perf_counter()
from recshard_lab.compat import install
install(shadow=True)
import torchrec
{}
"""
_SECONDS, _MODULES = "print(time.perf_counter() - begun)", "print(len(set(sys.modules) - before))"


def figures(quick: bool = False, only: list[str] | None = None) -> list[Figure]:
    """Totals, one row per module of TorchRec, and the import.

    Args:
        quick: fewer imports.
        only: run the parity cases of these files alone.
    """
    per_module = _names()
    cases, agree, differ, disagree = _parity(only)
    totals = Counter[str]()
    for counts in per_module.values():
        totals.update(counts)
    modules = [
        Figure(
            module,
            counts["served"],
            "served",
            beside={
                "differ": counts["differ"],
                "refused": counts["refused"],
                "cases": cases[module],
                "agree": agree[module],
            },
        )
        for module, counts in per_module.items()
    ]
    every = totals["served"] + totals["refused"]
    head = [
        Figure(SERVED, totals["served"], "names", at_most=False, beside={"of": every, "differ": totals["differ"]}),
        Figure(NO_REASON, totals["no reason"], "names"),
        Figure(CASES, agree[""], "cases", at_most=False, beside={"of": cases[""]}),
        Figure("parity cases that differ on purpose", differ, "cases"),
        Figure(DISAGREE, len(disagree), "cases", note="\n".join(disagree)),
    ]
    return [*head, _import(QUICK_ROUNDS if quick else ROUNDS), *modules]


def _names() -> dict[str, Counter[str]]:
    """Module -> how many names are served, differ, are refused, and have no reason."""
    found = {}
    for entry in coverage():
        refused = [reason_of(f"{entry.module}.{name}") for name in entry.missing]
        found[entry.module] = Counter(
            {
                "served": len(entry.served),
                "differ": sum(bool(differences_of(name)) for name in entry.served),
                "refused": len(refused),
                "no reason": refused.count(None),
            }
        )
    return found


def _parity(only: list[str] | None) -> tuple[Counter[str], Counter[str], int, list[str]]:
    """Cases by module ("": all), those that agree, the number that differs on purpose, and the first differences."""
    from tests.compat.parity.compare import CASES as FILES
    from tests.compat.parity.compare import Observer, difference, recorded

    cases, agree, differ = Counter[str](), Counter[str](), 0
    disagree: list[str] = []
    with closing(Observer(sys.executable, "recshard_lab")) as observer:
        for file in [path.stem for path in FILES if not only or path.stem in only]:
            note(f"parity cases of {file} ...")
            theirs = recorded(file)
            for name, result in observer.results(file).items():
                modules = ["", *_modules(result.get("names", ()))]
                cases.update(modules)
                if "error" in result or name not in theirs:
                    disagree.append(
                        f"{file}.{name} fails: {result.get('error', 'not recorded').strip().splitlines()[-1]}"
                    )
                elif result["differs"]:
                    differ += 1
                elif where := difference(theirs[name], result["value"]):
                    disagree.append(f"{file}.{name}: {where}")
                else:
                    agree.update(modules)
    return cases, agree, differ, disagree


def _modules(names: Iterable[str]) -> set[str]:
    """The modules of the names that a case uses: the name may be a method's."""
    known = {entry.module for entry in coverage()}
    return {
        next(module for module in _parents(name) if module in known)
        for name in names
        if any(module in known for module in _parents(name))
    }


def _parents(name: str) -> list[str]:
    """From the longest: ``a.b.C`` -> ``["a.b", "a"]``."""
    dots = [match.start() for match in re.finditer(r"\.", name)]
    return [name[:dot] for dot in reversed(dots)]


def _import(rounds: int) -> Figure:
    """The least time of fresh interpreters. The median of a busy machine is beside it."""
    code = _IMPORT.format(_SECONDS)
    seconds_in_new_python(code)  # writes the bytecode caches
    seconds = [seconds_in_new_python(code) for _ in range(rounds)]
    modules = seconds_in_new_python(_IMPORT.format(_MODULES))
    return Figure(IMPORT, min(seconds), "s", beside={"median": median(seconds), "modules": modules})

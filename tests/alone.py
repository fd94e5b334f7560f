"""Which test files need the machine for themselves.

``.ci/run`` runs ``pytest -m "not alone"`` first, three files at a time. Then it runs ``pytest -m alone``, one file at a
time. A file is alone if its own text reads a clock to measure. CPU time is no clock, as other processes do not add to
it. Neither is a deadline, as in ``end = time.monotonic() + 20``.

A file that measures in a way that its text does not show has the line ``pytestmark = pytest.mark.clock``.
"""

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent

MEASURES = re.compile(
    r"\b(perf_counter|timeit|time\.time|time_cases)\b|monotonic\(\) -|= time\.monotonic\(\)$", re.MULTILINE
)


@cache
def is_alone(path: Path) -> bool:
    """Whether the tests of this file are; doctests of the library are not.

    >>> is_alone(TESTS / "launcher/test_ranks.py"), is_alone(TESTS / "sparse/test_jagged_tensor.py")
    (True, False)
    """
    return path.is_relative_to(TESTS) and bool(why_alone(path))


def why_alone(path: Path) -> str:
    """Where the file measures; empty if it does not.

    >>> why_alone(TESTS / "launcher/test_ranks.py")
    '= time.monotonic()'
    """
    found = MEASURES.search(path.read_text())
    return found[0].strip() if found else ""

"""Which test files need the machine for themselves.

``.ci/run`` runs ``pytest -m "not alone"`` first, three files at a time. Then it runs ``pytest -m alone``, one file at a
time. A file is alone if its own text does one of these things:

- it reads a clock to measure. CPU time is no clock, as other processes do not add to it. Neither is a deadline, as in
  ``end = time.monotonic() + 20``;
- it interrupts ranks or kills other processes, which must answer within limits of time.

A file that measures in a way that its text does not show has the line ``pytestmark = pytest.mark.alone``.
"""

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent

MEASURES = re.compile(
    r"\b(perf_counter|timeit|time\.time|time_cases)\b|monotonic\(\) -|= time\.monotonic\(\)$", re.MULTILINE
)
STOPS_OTHERS = re.compile(r"\b(SIGINT|SIGSTOP|killpg|interrupt|interrupt_main)\b|os\.kill\((?!os\.getpid\(\))")


@cache
def is_alone(path: Path) -> bool:
    """Whether the tests of this file are; doctests of the library are not.

    >>> is_alone(TESTS / "launcher/test_ranks.py"), is_alone(TESTS / "sparse/test_jagged_tensor.py")
    (True, False)
    """
    return path.is_relative_to(TESTS) and bool(why_alone(path))


def why_alone(path: Path) -> str:
    """What the file does that needs the machine; empty if nothing does.

    >>> why_alone(TESTS / "launcher/test_ranks.py")
    'measures (= time.monotonic())'
    """
    text = path.read_text()
    for why, pattern in (("measures", MEASURES), ("stops others", STOPS_OTHERS)):
        if found := pattern.search(text):
            return f"{why} ({found[0].strip()})"
    return ""

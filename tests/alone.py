"""Which tests need the machine for themselves, because they time something or look at a page while it works.

``.ci/run`` runs the others first, several at a time and beside the demo, and these one after the other, with nothing
beside them: ``pytest -m "not alone"``, then ``pytest -m alone``. A room that is not named here, and a module that looks
at a clock, are alone; nothing has to be remembered when a test is added.
"""

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent

BESIDE_OTHERS = {
    *("cli", "compat", "data", "distributed", "embedding", "models", "optim", "planner", "sharding", "sparse"),
    *("train", "train_job"),
    *(f"test_{name}.py" for name in ("alone", "bad_arguments", "cores", "demo", "extension", "imports", "readme")),
}
CLOCK = re.compile(r"\b(perf_counter|process_time|thread_time|monotonic|timeit|time\.time)\b")
OF_ITS_JOBS = {"train/test_pipeline_overlap.py"}  # the clock is in what the ranks run


@cache
def is_alone(path: Path) -> bool:
    """Whether the tests of this file are; doctests of the library are not.

    >>> is_alone(TESTS / "browser/test_any.py"), is_alone(TESTS / "sparse/test_jagged_tensor.py")
    (True, False)
    """
    if not path.is_relative_to(TESTS):
        return False
    place = path.relative_to(TESTS)
    if place.parts[0] not in BESIDE_OTHERS or place.as_posix() in OF_ITS_JOBS:
        return True
    return CLOCK.search(path.read_text()) is not None

"""What tests need and pip cannot install: programs, and rights of the user.

A test names it: ``@pytest.mark.needs("redis-server")``. A case does so with ``marks=`` of ``pytest.param``. The marker
``browser`` needs ``chromium``. `tests/conftest.py` skips the test if it is missing, and counts such tests at the end.
With ``RECSHARD_ALL_PROGRAMS=1``, as in ``.ci/run``, they fail instead.

``python3 -m tests.programs`` prints the missing Debian packages. It runs before anything is installed.
"""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from functools import cache

ALL_PROGRAMS = os.environ.get("RECSHARD_ALL_PROGRAMS") == "1"

PACKAGES = {  # program -> its Debian package
    "chromium": "chromium",
    "fish": "fish",
    "g++": "g++",
    "hostname": "hostname",
    "ip": "iproute2",
    "mount": "mount",
    "node": "nodejs",
    "nsenter": "util-linux",
    "redis-server": "redis-server",
    "unshare": "util-linux",
    "zsh": "zsh",
}


@cache
def _may_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@cache
def _may_make_hosts() -> bool:
    from tests.launcher.hosts import possible

    return possible()


@cache
def _may_make_users() -> bool:
    from benchmarks.apparatus.kernel import own_network

    return not own_network()


RIGHTS = {  # a test names the programs first that these start
    "the right to mount": _may_mount,
    "network namespaces": _may_make_hosts,
    "user namespaces": _may_make_users,
}


def fix_of(need: str) -> str:
    """What brings it.

    >>> fix_of("node")
    'apt-get install --no-install-recommends nodejs'
    """
    if need in RIGHTS:
        return "run the tests as root; a container needs --privileged"
    return f"apt-get install --no-install-recommends {PACKAGES[need]}"


def missing(needs: Iterable[str]) -> str:
    """The first that is missing, with its fix; empty if none is."""
    for need in needs:
        if not (RIGHTS[need]() if need in RIGHTS else shutil.which(need)):
            return _reason(need)
    return ""


def summary(skipped: Iterable[str]) -> list[str]:
    """One line for each need that tests were skipped for.

    Args:
        skipped: the reason of every skipped test.

    >>> summary(["no GPU", "needs node. Fix: apt-get install --no-install-recommends nodejs"])
    ['1 skipped: needs node. Fix: apt-get install --no-install-recommends nodejs']
    """
    counts = Counter(skipped)
    reasons = map(_reason, [*PACKAGES, *RIGHTS])
    return [f"{counts[reason]} skipped: {reason}" for reason in reasons if counts[reason]]


def _reason(need: str) -> str:
    return f"needs {need}. Fix: {fix_of(need)}"


if __name__ == "__main__":
    print(*sorted({package for program, package in PACKAGES.items() if not shutil.which(program)}))

"""Each file of `cases` is a test file, and each of its cases a test: it gives what TorchRec 1.8 gave (`recorded`).

pytest-xdist spreads the files over its workers. A worker runs all its files in one other process.
"""

import sys
from collections.abc import Generator, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.compat.parity.compare import CASES, Observer, difference, names_of, recorded

OBSERVER = pytest.StashKey[Observer]()


def observer_of(config: pytest.Config) -> Observer:
    """The process that runs this worker's cases."""
    if OBSERVER not in config.stash:
        config.stash[OBSERVER] = observer = Observer(sys.executable, "recshard_lab")
        config.add_cleanup(observer.close)
    return config.stash[OBSERVER]


@pytest.fixture
def observer(pytestconfig: pytest.Config) -> Observer:
    """The same for a test."""
    return observer_of(pytestconfig)


class CaseFile(pytest.File):
    """One file of cases."""

    def collect(self) -> Iterator[pytest.Item]:
        """Its cases, without importing it."""
        for name in names_of(self.path):
            item = CaseItem.from_parent(self, name=name)
            item.add_marker(pytest.mark.timeout(900))  # the first one runs the file
            yield item

    @cached_property
    def ours(self) -> dict[str, Any]:
        """Results of this library."""
        return observer_of(self.config).results(self.path.stem)

    @cached_property
    def theirs(self) -> dict[str, Any]:
        """Stored results of TorchRec."""
        return recorded(self.path.stem)


class CaseItem(pytest.Item):
    """One case."""

    parent: CaseFile

    def runtest(self) -> None:
        """Compares the results."""
        ours, theirs = self.parent.ours, self.parent.theirs
        assert self.name in theirs, f"not recorded. Fix: python -m tests.compat.parity.record {self.path.stem}"
        assert self.name in ours, ours
        result = ours[self.name]
        assert "error" not in result, result["error"]
        found = difference(theirs[self.name], result["value"])
        assert not found or result["differs"], found
        assert found or not result["differs"], "it no longer differs. Fix: remove differs= from its case"

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """The message alone: the traceback is of this file."""
        return str(excinfo.value)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Takes files of cases from the collector of doctests, which would import them."""
    found = yield
    return [CaseFile.from_parent(parent, path=file_path)] if file_path in CASES else found

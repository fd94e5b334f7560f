"""Fixtures of launched ranks that stay up for a whole test file."""

from collections.abc import Iterator
from typing import Any

import pytest

from recshard_lab.launcher import Ranks, launch


def launched(size: int | list[Any], ids: Any = None, **options: Any) -> Any:
    """A fixture of ranks, launched once in a test file. Its name there is that of the variable.

    ``ranks = launched(2)`` has two ranks, and ``ranks = launched(worlds(2, 3))`` two, then three.

    Args:
        size: the number of ranks, or the fixture's ``params=``.
        ids: the fixture's ``ids=``.
        **options: of `launch`.
    """

    @pytest.fixture(scope="module", params=size if isinstance(size, list) else None, ids=ids)
    def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
        with launch(getattr(request, "param", size), **options) as running:
            yield running

    return ranks

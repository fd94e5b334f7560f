"""Ranks that stay up for a whole file: one set a world size."""

from collections.abc import Iterator
from typing import Any

import pytest

import recshard_lab
from tests.grid import worlds


@pytest.fixture(scope="module", params=worlds(1, 2, 3, 4))
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Launched ranks, for each world size."""
    with recshard_lab.launch(request.param) as launched:
        yield launched

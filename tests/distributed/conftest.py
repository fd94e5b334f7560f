"""Ranks that stay up for a whole file: one set a world size."""

from collections.abc import Iterator
from typing import Any

import pytest

import recshard_lab
from tests.grid import NIGHT, worlds


@pytest.fixture(scope="module", params=worlds(*((1, 2, 3, 4) if NIGHT else (2, 3))))
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Launched ranks, for each world size."""
    with recshard_lab.launch(request.param) as launched:
        yield launched


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    """Two ranks."""
    with recshard_lab.launch(2) as launched:
        yield launched


@pytest.fixture(scope="module")
def four() -> Iterator[Any]:
    """Four ranks."""
    with recshard_lab.launch(4) as launched:
        yield launched

"""Ranks that stay up for a whole file: one set a world size, and one set at a time."""

from collections.abc import Iterator
from typing import Any

import pytest

import recshard_lab
from tests.grid import NIGHT, worlds


@pytest.fixture(scope="module", params=worlds(*((1, 2, 3, 4) if NIGHT else (2, 3))))
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Launched ranks, for each world size: a number, or (number, nodes)."""
    number, nodes = request.param if isinstance(request.param, tuple) else (request.param, 1)
    with recshard_lab.launch(number, nodes=nodes) as launched:
        yield launched


@pytest.fixture
def two(ranks: Any) -> Any:
    """Two ranks."""
    return ranks


@pytest.fixture
def four(ranks: Any) -> Any:
    """Four ranks."""
    return ranks


@pytest.fixture
def nodes(ranks: Any) -> Any:
    """Four ranks on two virtual nodes."""
    return ranks


@pytest.hookimpl(tryfirst=True)  # before marks are read
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The others are `ranks` of one size, so that ranks of another size end before they start."""
    for name, size in (("two", 2), ("four", 4), ("nodes", (4, 2))):
        if name in metafunc.fixturenames:
            one = [pytest.param(size, id=pytest.HIDDEN_PARAM)]
            metafunc.definition.add_marker(pytest.mark.parametrize("ranks", one, indirect=True))

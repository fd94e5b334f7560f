"""An error on one rank of several sharding groups: every rank of every group raises it, and nothing is lost."""

from collections.abc import Iterator
from typing import Any

import pytest

import recshard_lab
from tests.distributed import failure_jobs as jobs
from tests.distributed.test_failures import BUILDING, STEPS, all_raise, call, unchanged


@pytest.fixture(scope="module")
def four() -> Iterator[Any]:
    """Four ranks."""
    with recshard_lab.launch(4) as launched:
        yield launched


@pytest.mark.parametrize(
    ("groups", "size", "bound"),
    [(2, None, None), (2, None, 1 << 10), (2, 4, 1 << 10), (4, 2, None)],
    ids=["groups beside", "groups parked", "fewer replicas", "more replicas"],
)
def test_replicas_whose_reshard_fails_on_one_rank_are_as_they_were(
    four: Any, groups: int, size: int | None, bound: int | None
) -> None:
    for step in ("place the second collection", "unpack a message"):
        unchanged(four, *STEPS[step], bound, groups, size)


def test_replicas_whose_constructor_fails_on_one_rank_fail_on_all(four: Any) -> None:
    for where in BUILDING[2:]:
        all_raise([error for error, _ in call(four, jobs.construct_failing, where, 2)])
    assert len(call(four, jobs.works_after)) == 4

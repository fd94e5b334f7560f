"""An error on one rank of several sharding groups: every rank of every group raises it, and nothing is lost."""

from typing import Any

import pytest
import torch

from tests.distributed import failure_jobs as jobs
from tests.distributed.jobs import attempted
from tests.distributed.step_failure_jobs import PLACES
from tests.distributed.test_failures import BUILDING, STEPS, all_raise, call, unchanged

pytestmark = pytest.mark.gate


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


PACK = "distributed.step.input_dist:InputDist.pack"


def steps_failing(where: str) -> tuple[list[str], Any]:
    """The errors of three steps and of a sync, where rank 3 fails in the first step, and the dense weights."""
    dmp, dense = jobs.build(2)
    jobs.train(dmp, dense, 0, 1)
    with jobs.failing(*jobs.owner_of(where), 3):
        errors = [attempted(lambda: jobs.train(dmp, dense, 1, 1))]
    errors += [attempted(lambda step=step: jobs.train(dmp, dense, step, 1)) for step in (2, 3)]
    errors.append(attempted(lambda: dmp.sync(optimizers=[dense])))
    return errors, dmp.module.over.weight.detach()


@pytest.mark.parametrize("where", [PACK, PLACES["lookup"], PLACES["arrival"]], ids=["pack", "lookup", "arrival"])
def test_an_error_in_a_forward_is_raised_in_all_sharding_groups_in_the_same_step(four: Any, where: str) -> None:
    results = call(four, steps_failing, where)
    for (first, *rest), weights in results:
        assert first == f"MemoryError: rank 3: {jobs.FAULT}"
        assert rest == ["", "", ""]
        assert torch.equal(weights, results[0][1])


def test_an_error_after_the_messages_of_a_step_is_raised_in_all_sharding_groups_in_the_next_step(four: Any) -> None:
    named = f"MemoryError: rank 3: {jobs.FAULT}"
    found = [errors for errors, _ in call(four, steps_failing, PLACES["kernel"])]
    assert found == [["", named, "", ""]] * 3 + [[named, named, "", ""]]


def evaluation_failing() -> list[str]:
    """The errors of an evaluation in which rank 3 fails, and of two syncs after it."""
    dmp, _ = jobs.build(2)
    with jobs.failing(*jobs.owner_of(PLACES["lookup"]), 3), torch.no_grad():
        errors = [attempted(lambda: dmp(jobs.batch(0)))]
    return errors + [attempted(lambda: dmp.sync(False)) for _ in range(2)]


def test_sync_raises_an_error_that_only_one_sharding_group_knows(four: Any) -> None:
    named = f"MemoryError: rank 3: {jobs.FAULT}"
    assert call(four, evaluation_failing) == [["", named, ""], [named, named, ""]] * 2

"""The unsharded model's state dict: on all ranks or on rank 0, on the device or on the CPU."""

from typing import Any

import pytest

from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases, state_form_jobs
from tests.distributed.jobs import Case


def case_of(schemes: list[str]) -> Case:
    return Case(cases.TABLES, cases.plan_of(cases.TABLES, schemes, 2).to_json(), [])


@pytest.mark.parametrize("schemes", [list(scheme_names()), list(scheme_names())[::-1]])
def test_the_whole_state_equals_the_unsharded_model_on_the_ranks_that_receive_it(two: Any, schemes: list[str]) -> None:
    for rank, (forms, truth) in enumerate(two.run(state_form_jobs.gathered, case_of(schemes))):
        for number, form in enumerate(forms):
            expected = truth if rank == 0 or number < 2 else {}
            assert state_form_jobs.differing(form, expected) == []
            assert list(form) == list(expected)


def test_of_several_replicas_only_rank_0_receives_the_state(two: Any) -> None:
    case = case_of(["table_wise"])
    case.plan = cases.plan_of(cases.TABLES, ["table_wise"], 1).to_json()
    names, others = two.run(state_form_jobs.gathered_from_replicas, case)
    assert len(names) == len(cases.TABLES) + 2
    assert others == []

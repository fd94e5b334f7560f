"""What ranks run in the tests of the forms of a state dict: whole on chosen ranks, and as DTensors."""

from typing import Any

import torch
from torch import Tensor

from tests.distributed import state_jobs, two_dimensional_jobs
from tests.distributed.jobs import Case, Model


def gathered(case: Case) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The whole state dict in all four forms, and the unsharded model's."""
    dmp = state_jobs.build(case)
    forms = [
        dmp.full_state_dict(rank0_only=only, cpu_offload=offload) for only in (False, True) for offload in (False, True)
    ]
    return forms, dict(Model(case).state_dict())


def gathered_from_replicas(case: Case) -> list[str]:
    """Names that this rank receives from two replicas on one rank each."""
    return list(two_dimensional_jobs.build(case, 1).full_state_dict(rank0_only=True))


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs in any bit."""
    return state_jobs.same(
        {k: v.detach().cpu() for k, v in one.items()}, {k: v.detach().cpu() for k, v in other.items()}
    )


def alone(case: Case) -> list[str]:
    """What differs between a process without ranks and the unsharded model."""
    assert not torch.distributed.is_initialized()
    return differing(state_jobs.build(case).full_state_dict(True, True), dict(Model(case).state_dict()))

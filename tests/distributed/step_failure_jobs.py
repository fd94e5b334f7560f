"""What ranks run in the tests of errors inside a step: one function of the step raises on one rank, once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from recshard_lab import DistributedModelParallel
from recshard_lab.train.pipelines import TrainPipelineSparseDist
from tests.distributed.failure_jobs import failing, owner_of
from tests.distributed.jobs import Case, attempted, batch_of, sharded_model

WRONG = 1  # the rank that fails
PLACES = {
    "ids": "distributed.step.input_dist:_joined",
    "ids' message": "distributed.step.input_dist:_issue_ids",
    "ids' arrival": "distributed.step.input_dist:InputDist.unpack",
    "lookup": "distributed.step.lookup:ShardLookup.forward",
    "output": "distributed.step.output_dist:_end_to_end",
    "order": "distributed.step.columns:Transposed.by_source",
    "message": "distributed.step.program:Step.send",
    "arrival": "distributed.step.program:Step.arrived",
    "kernel": "distributed.step.lookup:ShardLookup.backward",
    "row norms": "distributed.step.gradients:RowNormExchange.__call__",
    "weights": "distributed.step.kernels:exchange_weight_gradients",
}


@contextmanager
def nodes_of(ranks: int) -> Iterator[None]:
    """Nodes of so many ranks."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE")
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before


def step(dmp: DistributedModelParallel, case: Case, number: int) -> None:
    """Forward and backward of one batch."""
    rank = torch.distributed.get_rank()
    batch = batch_of(case.steps[number][rank], case.weighted, case.inverses(number)[rank]).to(case.device)
    if case.weighted:
        batch.weights().requires_grad_()
    dmp(batch)[1].sum().backward()


def fail_everywhere(case: Case, local: int | None = None) -> list[tuple[str, list[str], bool]]:
    """Fails each place at each of its calls in a step, then takes two steps without a fault.

    Returns:
        For each fault the place, the errors of the three steps on this rank, and whether its tables are unchanged.
    """
    found = []
    with nodes_of(local or torch.distributed.get_world_size()):
        dmp, _ = sharded_model(case)
        step(dmp, case, 0)
        for place, where in PLACES.items():
            with failing(*owner_of(where), WRONG, 10**9) as calls:
                step(dmp, case, 0)
            numbers: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(numbers, calls[0])
            for call in range(numbers[WRONG]):
                found.append((f"{place} {call}", *_fail(dmp, case, where, call)))
    return found


def pipeline_failing(case: Case, where: str) -> list[str]:
    """The errors of three batches of a pipeline, behind two others. The first of the three fails."""
    dmp, _ = sharded_model(case)
    rank, optimizer = torch.distributed.get_rank(), torch.optim.SGD(dmp.dense_parameters(), lr=0.1)
    batches = iter([batch_of(case.steps[0][rank], case.weighted) for _ in range(8)])

    def forward(batch: Any) -> tuple[torch.Tensor, None]:
        return dmp(batch)[1].sum(), None

    with TrainPipelineSparseDist(dmp, optimizer, torch.device("cpu"), custom_model_fwd=forward) as pipeline:
        errors = [attempted(lambda: pipeline.progress(batches)) for _ in range(2)]
        assert errors == ["", ""]
        with failing(*owner_of(where), WRONG):
            errors = [attempted(lambda: pipeline.progress(batches))]
        return [*errors, *(attempted(lambda: pipeline.progress(batches)) for _ in range(2))]


def _fail(dmp: DistributedModelParallel, case: Case, where: str, call: int) -> tuple[list[str], bool]:
    before = {name: value.clone() for name, value in _tables(dmp).items()}
    with ExitStack() as stack:
        stack.enter_context(failing(*owner_of(where), WRONG, call))
        errors = [attempted(lambda: step(dmp, case, 0))]
    unchanged = all(torch.equal(before[name], value) for name, value in _tables(dmp).items())
    errors += [attempted(lambda: step(dmp, case, 1)) for _ in range(2)]
    return errors, unchanged


def _tables(dmp: DistributedModelParallel) -> dict[str, Any]:
    return {
        f"{path} {shard}": weight
        for path, collection in dmp.collections.items()
        for shard, weight in collection.executor.lookup.weights().items()
    }

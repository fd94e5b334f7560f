"""The same comparisons on NVIDIA GPUs: one NCCL rank a GPU."""

import pytest
import torch

import recshard_lab
from recshard_lab import LaunchError
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.jobs import Case
from tests.distributed.test_parity import check

GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU on this machine")


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad"])
@pytest.mark.parametrize("scheme", scheme_names())
@pytest.mark.parametrize("backend", ["native", None])
def test_every_scheme_on_gpus_equals_the_unsharded_model(scheme: str, optimizer: str, backend: str | None) -> None:
    plan = cases.plan_of(cases.TABLES, [scheme], GPUS)
    steps = cases.random_steps(1, cases.TABLES, GPUS, steps=5, samples=6)
    with recshard_lab.launch(GPUS) as ranks:
        assert ranks.backend == "nccl"
        check(Case(cases.TABLES, plan.to_json(), steps, optimizer, backend=backend, device="cuda"), ranks)


@pytest.mark.cuda
@needs_gpu
def test_sequences_on_gpus_equal_the_unsharded_model() -> None:
    tables = cases.sequence_tables()
    plan = cases.plan_of(tables, ["row_wise", "column_wise", "table_wise", "data_parallel"], GPUS)
    steps = cases.random_steps(2, tables, GPUS, steps=4, samples=6)
    with recshard_lab.launch(GPUS) as ranks:
        check(Case(tables, plan.to_json(), steps, "exact_sgd", sequence=True, device="cuda"), ranks)


def test_more_nccl_ranks_than_gpus_are_refused_with_the_number_of_gpus() -> None:
    with pytest.raises(LaunchError, match=rf"n={GPUS + 1}.*has {GPUS}\b.*backend='gloo'"):
        recshard_lab.launch(GPUS + 1, backend="nccl")

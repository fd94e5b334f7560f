"""launch(threads=) reaches every pool of threads on a rank."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from threadpoolctl import threadpool_info

from recshard_lab.cores import usable_cores
from recshard_lab.launcher import launch

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _three_threads_in_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("OMP", "MKL", "OPENBLAS"):
        monkeypatch.setenv(f"{library}_NUM_THREADS", "3")


def pools() -> dict[str, Any]:
    """The threads of each pool on this rank."""
    found = {os.path.basename(pool["filepath"]): (pool["user_api"], pool["num_threads"]) for pool in threadpool_info()}
    told = re.findall(
        r"(get_num_threads|omp_get_max_threads|mkl_get_max_threads)\(\) : (\d+)", torch.__config__.parallel_info()
    )
    return {**found, **{name: ("torch", int(number)) for name, number in told}}


@pytest.mark.gate
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("threads", [4, 1])
def test_torch_openmp_mkl_and_numpys_blas_have_the_requested_threads(start_method: str, threads: int) -> None:
    with launch(1, threads=threads, start_method=start_method) as ranks:
        (found,) = ranks.run(pools)
        assert ranks.run(torch.get_num_threads) == [threads]
    assert {api for api, _ in found.values()} == {"blas", "openmp", "torch"}
    assert {"get_num_threads", "omp_get_max_threads"} <= set(found)
    assert {count for _, count in found.values()} == {threads}, found


def test_a_blas_that_a_rank_loads_later_has_them_too() -> None:
    def later() -> list[int]:
        before = {pool["filepath"] for pool in threadpool_info()}
        import scipy.linalg  # noqa: F401

        return [pool["num_threads"] for pool in threadpool_info() if pool["filepath"] not in before]

    for threads in (1, usable_cores()):  # OpenBLAS reads the variable, and starts at most one thread per core
        with launch(1, threads=threads) as ranks:
            assert ranks.run(later) == [[threads]]

"""Random numbers of ranks, separate or repeatable by a seed; and ``launch(threads=)`` for every pool of threads."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset

from recshard_lab.cores import usable_cores
from recshard_lab.launcher import LaunchError, RankError, Ranks, join, launch
from recshard_lab.launcher.seeds import seed_rank

pytestmark = pytest.mark.timeout(120)


class Drawing(Dataset[float]):
    """Its items are random numbers of the process that loads them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> float:
        return float(torch.rand(()))


def draws() -> dict[str, list[float]]:
    """The next numbers of this rank, by their source."""
    return {
        "torch.rand": torch.rand(4).tolist(),
        "torch.randperm": torch.randperm(100).tolist(),
        "dropout": torch.nn.functional.dropout(torch.ones(64)).tolist(),
        "a module": torch.nn.Linear(4, 1).weight[0].tolist(),
        "shuffle=True": [int(number) for number in DataLoader(list(range(50)), shuffle=True)],
        "numpy": np.random.rand(4).tolist(),
        "random": [random.random() for _ in range(4)],
    }


def states() -> tuple[Any, ...]:
    """Where the generators of this process are."""
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), kind, keys.tolist(), rest, random.getstate()


def all_differ(found: list[dict[str, list[float]]]) -> bool:
    """Whether no two of these draws have equal numbers from any source."""
    return all(len({tuple(each[source]) for each in found}) == len(found) for source in found[0])


@pytest.fixture(scope="module")
def of_seed_7() -> list[dict[str, list[float]]]:
    """The first draws of three forked ranks."""
    with launch(3, start_method="fork", seed=7) as ranks:
        return ranks.run(draws)


@pytest.fixture
def states_kept() -> Iterator[None]:
    """Restores the generators of this process afterwards."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])


def test_ranks_launches_and_seeds_differ(of_seed_7: list[dict[str, list[float]]]) -> None:
    with launch(2) as ranks:
        first = ranks.run(draws)
        ranks.restart()
        assert all_differ([*first, *ranks.run(draws)])
    with launch(3, seed=8) as ranks:
        assert all_differ([*of_seed_7, *ranks.run(draws)])


def test_a_seed_repeats_the_numbers_of_each_rank_under_every_engine_and_after_a_restart(
    of_seed_7: list[dict[str, list[float]]],
) -> None:
    assert all_differ(of_seed_7)
    with launch(2, start_method="spawn", seed=7) as ranks:  # a rank's numbers do not depend on the world size
        assert ranks.run(draws) == of_seed_7[:2]
    with launch(2, seed=7) as ranks:
        ranks.restart()
        assert ranks.run(draws) == of_seed_7[:2]


def test_the_rebuild_after_an_error_does_not_seed_again(of_seed_7: list[dict[str, list[float]]]) -> None:
    with launch(3, seed=7) as ranks:
        assert ranks.run(draws) == of_seed_7
        before = ranks.run(states)
        with pytest.raises(RankError, match="Process groups were rebuilt"):
            ranks.exec("if rank == 1: raise ValueError\ndist.barrier()")
        with pytest.raises(RankError, match="Process groups were rebuilt"):
            ranks.exec("dist.destroy_process_group()\nif rank == 1: raise ValueError")
        assert ranks.run(states) == before


def test_workers_of_a_dataloader_draw_separate_numbers_on_each_rank_that_a_seed_repeats() -> None:
    def loaded() -> dict[str, list[float]]:
        return {"items": [float(item) for item in DataLoader(Drawing(), num_workers=2)]}

    with launch(2, seed=7) as ranks:
        first = ranks.run(loaded)
        assert all_differ(first)
        ranks.restart()
        assert ranks.run(loaded) == first


@pytest.mark.usefixtures("states_kept")
@pytest.mark.parametrize("seed", [None, 7])
def test_gpus_get_the_seed_of_the_cpu_and_are_not_started(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> None:
    def started() -> None:
        raise AssertionError("CUDA was started")

    seeds: list[int] = []
    delayed = torch.cuda.manual_seed_all
    monkeypatch.setattr(torch.cuda, "_lazy_init", started)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda number: (seeds.append(number), delayed(number)))
    seed_rank(seed, 1)
    assert seeds == [torch.initial_seed()]


@pytest.mark.usefixtures("states_kept")
def test_join_seeds_a_script_only_if_told_to(of_seed_7: list[dict[str, list[float]]]) -> None:
    before = states()
    with join():
        assert states() == before
    with join(seed=7) as place:
        assert draws() == of_seed_7[place.rank]


def test_join_seeds_launched_ranks_only_if_told_to(of_seed_7: list[dict[str, list[float]]]) -> None:
    def script(seed: int | None) -> tuple[bool, dict[str, list[float]]]:
        before = states()
        with join(seed=seed):
            return states() == before, draws()

    with launch(3, seed=8) as ranks:
        assert [kept for kept, _ in ranks.run(script, None)] == [True] * 3
        assert [drawn for _, drawn in ranks.run(script, 7)] == of_seed_7


def test_a_seed_is_part_of_the_shape(ranks: Ranks) -> None:
    assert "seed" not in str(ranks.shape)
    with pytest.raises(LaunchError, match=r"requested 3 ranks over gloo, seed 7, but 3 ranks over gloo are running"):
        launch(3, seed=7)
    ranks.stop()
    with launch(3, seed=7) as seeded, launch(3, seed=7) as again:
        assert again is seeded
    with pytest.raises(LaunchError, match=r"join\(seed=-1\): expected a whole number"), join(seed=-1):
        pass
    assert not dist.is_initialized()


@pytest.fixture
def three_threads_here(monkeypatch: pytest.MonkeyPatch) -> None:
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
@pytest.mark.usefixtures("three_threads_here")
@pytest.mark.parametrize(("start_method", "threads"), [("fork", 4), ("spawn", 1)])
def test_torch_openmp_mkl_and_numpys_blas_have_the_requested_threads(start_method: str, threads: int) -> None:
    with launch(1, threads=threads, start_method=start_method) as ranks:
        (found,) = ranks.run(pools)
        assert ranks.run(torch.get_num_threads) == [threads]
    assert {api for api, _ in found.values()} == {"blas", "openmp", "torch"}
    assert {"get_num_threads", "omp_get_max_threads"} <= set(found)
    assert {count for _, count in found.values()} == {threads}, found


@pytest.mark.usefixtures("three_threads_here")
def test_a_blas_that_a_rank_loads_later_has_them_too() -> None:
    def later() -> list[int]:
        before = {pool["filepath"] for pool in threadpool_info()}
        import scipy.linalg  # noqa: F401

        return [pool["num_threads"] for pool in threadpool_info() if pool["filepath"] not in before]

    for threads in (1, usable_cores()):  # OpenBLAS reads the variable, and starts at most one thread per core
        with launch(1, threads=threads) as ranks:
            assert ranks.run(later) == [[threads]]

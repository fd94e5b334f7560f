"""Device memory: what ranks report is what tensors take, and a limit raises before more is allocated."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recshard_lab import EmbeddingShardingPlanner, ParameterConstraints
from recshard_lab.embedding import EmbeddingBagConfig, EmbOptimType, FusedEmbeddingBagCollection, kernels
from recshard_lab.lab import measure_plan
from recshard_lab.launcher import LaunchError, RankError, Ranks, device_memory, launch
from recshard_lab.launcher.device_memory import counting, limit, measure, with_rest
from recshard_lab.planner import Workload
from recshard_lab.sharding import PlanError, ShardingPlan, Topology
from tests.launched import launched
from tests.launcher.waiting import running
from tests.patience import wait_until

GB = 0.06
MOVIES = [EmbeddingBagConfig(name="movies", num_embeddings=300_000, embedding_dim=64, feature_names=["f"])]  # 76.8 MB
LOAD = Workload(256, {"f": 5.0}, optimizer="exact_row_wise_adagrad")


small = launched(2, memory_gb=GB)


def plan(scheme: str, topology: Topology) -> ShardingPlan:
    constraints = {"movies": ParameterConstraints(sharding_types=[scheme], min_partition=32)}
    return EmbeddingShardingPlanner(topology, constraints=constraints, workload=LOAD).plan_tables(MOVIES)


def test_ranks_without_a_limit_report_their_process_and_follow_no_operator() -> None:
    with launch(2) as ranks:
        ranks.exec("layer = torch.nn.Linear(999, 1000)")
        ranks.memory(reset_peak=True)
        ranks.exec("large = torch.ones(50_000_000)\ndel large")
        for one in ranks.memory():
            assert one.source == "process"
            assert one.weights == 4_000_000
            assert one.peak is not None
            assert 150e6 < one.peak - one.in_use < 250e6
            assert one.parts["process"] == one.peak - 4_000_000
        assert ranks.run(lambda: len(torch.utils._python_dispatch._get_current_dispatch_mode_stack())) == [0, 0]
        with pytest.raises(LaunchError, match="have no CUDA allocator to record"), ranks.memory_snapshot("never"):
            pass
    with pytest.raises(LaunchError, match="stopped"):
        ranks.memory()


FILLS = """
import gc
gc.disable()  # else it may run by chance

class Holder:
    pass

def fill():
    holder = Holder()
    holder.itself, holder.tensor = holder, torch.zeros(10_000_000)
    torch.zeros(10_000_000)
"""


def test_a_cell_that_ran_out_of_memory_leaves_nothing_in_it(small: Ranks) -> None:
    small.exec(FILLS)
    try:
        with pytest.raises(RankError, match="out of memory"):
            small.exec("fill()")
        small.exec("torch.zeros(10_000_000)")
    finally:
        small.exec("gc.enable()")


def test_a_plan_that_the_planner_refuses_runs_out_of_memory_and_the_plans_that_it_makes_run(small: Ranks) -> None:
    told = Topology(2).with_memory(GB)
    with pytest.raises(PlanError, match=r"does not fit on any rank with table_wise.*Fix: allow row_wise on 2 ranks"):
        plan("table_wise", told)
    with pytest.raises(RankError) as raised:
        measure_plan(small, plan("table_wise", Topology(2)), MOVIES, LOAD, steps=1)
    assert {failure.name for failure in raised.value.failures} == {"OutOfMemoryError"}  # on both ranks
    assert "Tried to allocate 76.80 MB. Rank 0 has a total capacity of 60.00 MB" in str(raised.value)
    for scheme in ("row_wise", "column_wise"):
        found = measure_plan(small, plan(scheme, told), MOVIES, LOAD, steps=1)
        for one in found.in_use:
            assert one.source == "counted"
            assert one.weights == pytest.approx(38.4e6, rel=0.01)
            assert one.capacity == 60_000_000
            assert one.peak is not None
            assert one.peak <= one.capacity
    assert max(one.in_use for one in small.memory()) < 1e6, "the models are gone, and with them their bytes"


def test_views_count_once_and_deleted_tensors_make_room(small: Ranks) -> None:
    before = [one.in_use for one in small.memory(reset_peak=True)]
    small.exec("kept = torch.zeros(10_000_000)\nviews = [kept[3:], kept.view(10, -1), kept.t(), kept.detach()]")
    assert [one.in_use - was for one, was in zip(small.memory(), before, strict=True)] == [40_000_000] * 2
    for source in ("1", "del kept"):  # the views hold the memory
        small.exec(source)
        with pytest.raises(RankError, match=r"OutOfMemoryError: CPU out of memory\. Tried to allocate 40\.00 MB\."):
            small.exec("more = torch.ones(10_000_000)")
    small.exec("del views\nmore = torch.ones(10_000_000)\nmore = None")
    after = small.memory(reset_peak=True)
    assert [one.in_use for one in after] == before
    assert [one.peak for one in after] == pytest.approx([was + 40_000_000 for was in before], abs=100)
    assert [one.peak for one in small.memory()] == before


IN_A_THREAD = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool: pool.submit(torch.ones, 10**8).result()
"""


def test_results_too_large_are_refused_before_they_are_computed_and_others_before_they_are_kept(small: Ranks) -> None:
    for source, size in (
        ("torch.zeros(10**12)", "4000.00 GB"),
        ("torch.randn(10**12, generator=torch.Generator())", "4000.00 GB"),
        ("torch.ones(10**5, 1) @ torch.ones(1, 10**5)", "40.00 GB"),
        ("torch.nn.functional.one_hot(torch.arange(10**4), 10**6)", "80.00 GB"),
        ("torch.cat([torch.ones(10**7)] * 3)", "120.00 MB"),
        ("torch.ones(10**7, dtype=torch.bool).nonzero()", "80.00 MB"),  # its size depends on its data
        ("grown = torch.ones(1)\ngrown.resize_(10**8)", ""),
        (IN_A_THREAD, ""),  # as pipelines have
    ):
        with pytest.raises(RankError, match=rf"OutOfMemoryError.*Tried to allocate {size}"):
            small.exec(source, ranks=[1])


def test_a_limit_changes_no_result(small: Ranks) -> None:
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Dropout(0.5), torch.nn.Linear(200, 100))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(500, 100)).square().mean().backward()
            optimizer.step()
        return [weight.detach().clone() for weight in model.parameters()]

    for found in small.run(trained):
        for ours, theirs in zip(found, trained(), strict=True):
            assert torch.equal(ours, theirs)


def test_memory_is_split_by_use_and_answers_while_a_cell_runs(small: Ranks, tmp_path: Path) -> None:
    small.exec(
        "import os, time\n"
        "layer = torch.nn.Linear(999, 1000)\n"
        "adam = torch.optim.Adam(layer.parameters())\n"
        "layer(torch.ones(1, 999)).sum().backward()\nadam.step()"
    )
    wait = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    cell = threading.Thread(target=small.exec, args=(wait,))
    cell.start()
    wait_until(lambda: running(small))
    for rank, one in enumerate(small.memory()):
        assert (one.rank, one.device) == (rank, "cpu")
        assert one.weights == one.gradients == 4_000_000
        assert one.optimizer_state == pytest.approx(8_000_000, rel=1e-5)  # and the two step counts
        assert one.process is not None
        assert one.process > one.in_use
        assert sum(one.parts.values()) == one.peak
    assert running(small)
    (tmp_path / "go").touch()
    cell.join()
    small.exec("del layer, adam")


def test_counting_reports_the_peak_of_a_block_and_ends_with_it() -> None:
    weight = torch.nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), 0.1)
    with counting():
        begun = measure("cpu")
        result = weight(torch.ones(500, 1000)).relu()  # three of 2 MB each
        del result
        found = measure("cpu")
        optimizer.state[weight.weight]["view"] = weight.weight[1:]  # a storage in two categories counts in one
        assert measure("cpu").optimizer_state == begun.optimizer_state
    assert found.peak is not None
    assert found.peak - begun.in_use == 6_000_000
    assert found.in_use == begun.in_use >= weight.weight.nbytes
    assert measure("cpu").source == "process"


# -- CUDA without a GPU: torch's and the driver's figures are patched -------------------------------------


UUID = "6b1e7a52-0000-0000-0000-000000000001"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    stats = {
        "allocated_bytes.all.current": 600,
        "allocated_bytes.all.peak": 900,
        "reserved_bytes.all.current": 1000,
    }
    calls: dict[str, Any] = {"stats": stats}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * 10**9, 8 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.update(mark=device))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: calls.update(fraction=args))
    monkeypatch.setattr(device_memory, "_gpu_limit", 0)
    monkeypatch.setattr(device_memory, "_gpu_process_bytes", lambda uuid, reserved: None)
    return calls


def test_on_cuda_the_allocator_and_the_whole_gpu_are_read(gpu: dict[str, Any]) -> None:
    one = measure("cuda:0")
    assert (one.source, one.in_use, one.peak, one.allocator_cache) == ("allocator", 600, 900, 400)
    assert (one.gpu, one.gpu_used, one.gpu_total, one.capacity) == (UUID, 3 * 10**9, 8 * 10**9, 8 * 10**9)
    assert one.parts == dict.fromkeys(device_memory.MEASURED_CATEGORIES, 0) | {
        "activations": 900,
        "allocator_cache": 100,
    }
    device_memory.reset_peak("cuda:0")
    assert gpu["mark"] == torch.device("cuda:0")


def test_ranks_that_share_a_gpu_share_what_is_outside_their_allocators(gpu: dict[str, Any]) -> None:
    one = measure("cuda:0")
    other = replace(one, rank=2, gpu="another", gpu_used=1500)
    assert [each.gpu_rest for each in with_rest([one, replace(one, rank=1), other])] == [3 * 10**9 - 2000] * 2 + [500]


def test_a_limit_on_cuda_is_a_share_of_the_gpu(gpu: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match=r"launch\(memory_gb=9\): cuda:0 has 8\.0 GB\. Fix: memory_gb=8"):
        limit(9, "cuda:0")
    limit(2, "cuda:0")
    assert gpu["fraction"] == (0.25, torch.device("cuda:0"))
    assert measure("cuda:0").capacity == 2 * 10**9


@pytest.mark.parametrize(
    ("pids", "used", "expected"),
    [("ours", 5000, 5000), ("another's", 5000, None), ("ours", 999, None), ("error", 0, None)],
)
def test_the_drivers_figure_counts_only_if_it_can_be_this_process(
    monkeypatch: pytest.MonkeyPatch, pids: str, used: int, expected: int | None
) -> None:
    def processes(handle: str) -> list[Any]:
        assert handle == f"GPU-{UUID}"
        if pids == "error":
            raise ZeroDivisionError
        return [SimpleNamespace(pid=os.getpid() + (pids != "ours"), usedGpuMemory=used)]

    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=processes,
        NVMLError=ZeroDivisionError,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert device_memory._gpu_process_bytes(UUID, reserved=1000) == expected


@pytest.mark.skipif("fbgemm" not in kernels.available(), reason="needs fbgemm_gpu")
def test_states_of_fbgemms_kernel_are_no_weights() -> None:
    """They are buffers of its module."""
    before = measure("cpu")
    tables = [EmbeddingBagConfig(1_000_000, 4, name="t", feature_names=["f"])]
    kept = FusedEmbeddingBagCollection(tables, EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"lr": 0.1}, backend="fbgemm")
    after = measure("cpu")
    assert kept.backend == "fbgemm"
    assert after.optimizer_state - before.optimizer_state == 4e6
    assert after.weights - before.weights == pytest.approx(16e6, rel=1e-3)


# -- CUDA ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Ranks]:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    with launch(1, memory_gb=4) as ranks:
        yield ranks


@pytest.mark.cuda
def test_the_limit_raises_torchs_error_and_memory_comes_back(on_gpu: Ranks) -> None:
    on_gpu.exec("large = torch.empty(500_000_000, device=device)")  # 2 of 4 GB
    (held,) = on_gpu.memory()
    assert held.in_use >= 2e9
    assert held.gpu_used > held.in_use + held.allocator_cache, "the CUDA context is outside the allocator"
    assert held.gpu_rest > 0
    with pytest.raises(RankError, match=r"OutOfMemoryError: CUDA out of memory"):
        on_gpu.exec("more = torch.empty(700_000_000, device=device)")
    on_gpu.exec("del large\nmore = torch.empty(700_000_000, device=device)\ndel more")
    (peak,) = on_gpu.memory(reset_peak=True)
    assert peak.peak is not None
    assert peak.peak >= 2.8e9
    (after,) = on_gpu.memory()
    assert after.peak == after.in_use < 0.1e9
    assert after.allocator_cache >= 2.8e9


@pytest.mark.cuda
def test_a_snapshot_holds_the_allocations_of_the_block(on_gpu: Ranks, tmp_path: Any) -> None:
    with on_gpu.memory_snapshot(tmp_path) as files:
        on_gpu.exec("some = torch.empty(1_234_567, device=device)\ndel some")
    (file,) = files
    actions = [entry for trace in pickle.loads(Path(file).read_bytes())["device_traces"] for entry in trace]
    assert any(entry["action"] == "alloc" and entry["size"] >= 4 * 1_234_567 for entry in actions)


def test_exchange_buffers_of_another_kind_of_device_are_not_counted() -> None:
    class Exchanges(torch.nn.Module):
        device = torch.device("meta")

        def exchange_bytes(self) -> int:
            return 10**15

    exchanges = Exchanges()
    assert measure("cpu").exchange_buffers < exchanges.exchange_bytes()

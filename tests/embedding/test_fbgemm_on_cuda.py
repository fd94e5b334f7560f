"""What fbgemm serves on CUDA, and with which arguments. No test here runs a CUDA kernel; `tests/ledger` does."""

import copy
import gc
import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recshard_lab.distributed.step.lookup import choose_kernels, fbgemm_caches
from recshard_lab.embedding import DataType, EmbeddingBagConfig, EmbOptimType, OptimizerSpec, WeightDecayMode
from recshard_lab.embedding.dynamic.config import EmulatedCost
from recshard_lab.embedding.kernels import (
    KernelInput,
    KernelSpec,
    ShardSpec,
    available,
    choose_kernel,
    fbgemm,
    fbgemm_cached,
)
from recshard_lab.embedding.kernels.fbgemm import FbgemmKernel
from recshard_lab.embedding.kernels.fbgemm_cached import FbgemmCache, FbgemmCachedKernel
from recshard_lab.sharding import CacheParams, ParameterSharding, Shard
from tests.embedding.lookups import SPECS, look_up
from tests.grid import every

pytestmark = pytest.mark.skipif("fbgemm" not in available(), reason="needs fbgemm_gpu")

ADAM = OptimizerSpec(EmbOptimType.ADAM, 0.1)
ROWWISE = OptimizerSpec(EmbOptimType.EXACT_ROWWISE_ADAGRAD, 0.1)
DECAYED = {spec.optimizer: replace(spec, weight_decay=0.1, weight_decay_mode=None) for spec in SPECS}


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the installed fbgemm had CUDA kernels."""
    monkeypatch.setattr(fbgemm, "why_no_cuda", lambda: None)


def chosen(spec: OptimizerSpec | None, **changes: Any) -> str:
    shape = changes.pop("columns", 8), changes.pop("data_type", DataType.FP32), changes.pop("full", 8)
    backend, job = changes.pop("backend", None), {"device": torch.device("cuda"), **changes}
    return choose_kernel(KernelSpec([ShardSpec("t", 8, *shape)], [0], spec, **job), backend).name


def test_kernels_of_replicas_step_in_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, backward = [], torch.autograd.backward

    def watched(*arguments: Any) -> None:
        seen.append(
            (torch.are_deterministic_algorithms_enabled(), torch._C._get_deterministic_fill_uninitialized_memory())
        )
        backward(*arguments)

    monkeypatch.setattr(torch.autograd, "backward", watched)
    spec = KernelSpec([ShardSpec("t", 8, 8, DataType.FP32, 8)], [0], ROWWISE)
    for deterministic in (False, True):
        kernel = FbgemmKernel(spec._replace(deterministic=deterministic))
        rows, saved = look_up(kernel, torch.tensor([1, 1, 2]), torch.tensor([0, 2, 3]))
        kernel.backward(saved, torch.ones_like(rows))
    assert seen == [(False, True), (True, False)]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch._C._get_deterministic_fill_uninitialized_memory()


DIMENSIONS = [{"pooled": p, "data_type": kind} for p in (True, False) for kind in (DataType.FP32, DataType.FP16)]
NO_DECAY = {EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD}
BY_FBGEMM: list[tuple[OptimizerSpec | None, dict[str, Any]]] = [
    *((spec, changes) for spec in SPECS for changes in DIMENSIONS),
    *((spec, {}) for kind, spec in DECAYED.items() if kind not in NO_DECAY),
    (replace(DECAYED[ROWWISE.optimizer], weight_decay_mode=WeightDecayMode.DECOUPLE), {}),
    (ADAM, {"weighted": True}),
]
BY_NATIVE: list[tuple[OptimizerSpec | None, dict[str, Any]]] = [
    *((DECAYED[kind], {}) for kind in NO_DECAY),
    (replace(DECAYED[EmbOptimType.ADAM], weight_decay_mode=WeightDecayMode.L2), {}),
    *((replace(ADAM, **more), {}) for more in ({"max_norm": 1.0}, {"gradient_clipping": True})),
    (replace(ADAM, check_gradients=True), {}),
    (None, {}),
    *((ADAM, {"data_type": kind}) for kind in (DataType.FP64, DataType.BF16)),
    *((ADAM, {"columns": columns}) for columns in (6, 4096)),
    *((ROWWISE, changes) for changes in ({"columns": 4}, {"joins_norms": True})),
]


@every([*(("fbgemm", *own) for own in BY_FBGEMM), *(("native", *own) for own in BY_NATIVE)])
def test_native_serves_what_fbgemm_has_not(case: Any, cuda_build: None) -> None:
    name, spec, changes = case
    assert chosen(spec, **changes) == name


def test_a_cpu_build_serves_no_cuda_table(monkeypatch: pytest.MonkeyPatch) -> None:
    fbgemm.why_no_cuda.cache_clear()
    versions = {"fbgemm-gpu-cpu": "1.8.0", "fbgemm-gpu": None}
    monkeypatch.setattr(fbgemm, "_version", versions.get)
    try:
        assert chosen(ADAM) == "native"
        with pytest.raises(ValueError, match=r"fbgemm-gpu-cpu has CPU kernels only. Fix: pip install"):
            chosen(ADAM, backend="fbgemm")
        fbgemm.why_no_cuda.cache_clear()
        versions.update({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"})
        assert chosen(ADAM) == "fbgemm"
    finally:
        fbgemm.why_no_cuda.cache_clear()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of fbgemm's modules, which are stand-ins."""
    made: list[dict[str, Any]] = []
    signature = inspect.signature(fbgemm._fbgemm().SplitTableBatchedEmbeddingBagsCodegen.__init__)

    def record(**arguments: Any) -> SimpleNamespace:
        signature.bind_partial(**arguments)  # fbgemm knows them
        made.append(arguments)
        return SimpleNamespace()

    names = {**vars(fbgemm._fbgemm()), "SplitTableBatchedEmbeddingBagsCodegen": record}
    monkeypatch.setattr(fbgemm, "_fbgemm", lambda: SimpleNamespace(**names))
    return made


def unmade(kind: type[FbgemmKernel], data_type: DataType) -> Any:
    """A kernel on a GPU before it makes modules: two tables and three features."""
    kernel = kind.__new__(kind)
    shards = [ShardSpec("a", 9, 8, data_type, 8), ShardSpec("b", 7, 8, data_type, 8)]
    kernel._serve(KernelSpec(shards, (1, 0, 0), SGD, device=torch.device("cuda")))
    return kernel


@pytest.mark.parametrize("mode", [WeightDecayMode.L2, WeightDecayMode.DECOUPLE])
def test_the_arguments_of_a_cuda_module(modules: list[dict[str, Any]], mode: WeightDecayMode) -> None:
    real = fbgemm._fbgemm()
    spec = replace(DECAYED[ROWWISE.optimizer], weight_decay_mode=mode, learning_rate=0.5, eps=1e-4)
    kernel = unmade(FbgemmKernel, DataType.FP16)
    kernel._make_tbe([0, 1], [1, 2, 0], spec)
    lamb = replace(DECAYED[EmbOptimType.LAMB], beta1=0.7, beta2=0.8)
    kernel._make_tbe([0], [1, 2], lamb)
    kernel._make_tbe([0], [1, 2], replace(DECAYED[EmbOptimType.LARS_SGD], momentum=0.6, eta=0.3))
    recorded, of_lamb, of_lars = modules
    place = (real.EmbeddingLocation.DEVICE, real.ComputeDevice.CUDA)
    assert recorded["embedding_specs"] == [(9, 8, *place), (7, 8, *place)]
    assert recorded["feature_table_map"] == [0, 0, 1]
    assert recorded["weights_precision"] is real.SparseType.FP16
    assert recorded["output_dtype"] is real.SparseType.FP32
    assert recorded["weight_decay_mode"] is real.WeightDecayMode(mode.value)
    numbers = {"learning_rate": 0.5, "eps": 1e-4, "weight_decay": 0.1}
    assert {name: recorded[name] for name in numbers} == numbers
    assert not recorded["stochastic_rounding"]
    assert (of_lamb["beta1"], of_lamb["beta2"], of_lamb["weight_decay"]) == (0.7, 0.8, 0.1)
    assert of_lamb["weight_decay_mode"] is real.WeightDecayMode.NONE  # its formula has one place for the decay
    assert (of_lars["momentum"], of_lars["eta"]) == (0.6, 0.3)


class Module:
    """A stand-in for fbgemm's CUDA module under Adam: counts lookups as it does, and records each step's number."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.iter_cpu, self.iter = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self.tables = [torch.zeros(size) for size in sizes]
        self.numbers: list[int] = []

    def split_embedding_weights(self) -> list[Tensor]:
        return self.tables

    def split_optimizer_states(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.zeros_like(own), torch.zeros_like(own)) for own in self.tables]

    def __call__(self, ids: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        if self.iter_cpu.item() == 0:
            self.iter_cpu.fill_(self.iter.cpu().item())
        self.numbers.append(int(self.iter_cpu.add_(1)))
        self.iter.add_(1)
        return torch.zeros(1, 4 * (offsets.numel() - 1), requires_grad=True) * 1


class Counting(FbgemmKernel):
    name = "counting"

    @classmethod
    def refuses(cls, *arguments: Any, **more: Any) -> None:
        return None

    def _make_tbe(self, indices: list[int], features: list[int], optimizer: OptimizerSpec) -> Module:
        return Module([(self.shards[index].num_rows, self.shards[index].num_cols) for index in indices])


def looked_up(kernel: Counting) -> Any:
    return look_up(kernel, torch.tensor([0, 1]), torch.tensor([0, 1, 2]))[1]


def test_steps_are_numbered_by_backward_passes() -> None:
    """fbgemm numbers a step when it looks up. Evaluation must not count, and lookups ahead of their step must."""
    kernel = Counting(KernelSpec([ShardSpec(name, 5, 4, DataType.FP32, 4) for name in "ab"], [0, 1], ADAM))
    (module,), grad = kernel._tbes, torch.ones(1, 8)
    counts = [own["iter"] for own in kernel.optimizer_states()]
    for _ in range(2):
        kernel.backward(looked_up(kernel), grad)
    looked_up(kernel)  # evaluation: the result is dropped
    gc.collect()
    first, second = looked_up(kernel), looked_up(kernel)
    kernel.backward(first, grad)
    third = looked_up(kernel)
    kernel.backward(second, grad)
    kernel.backward(third, grad)
    assert module.numbers == [1, 2, 3, 3, 4, 5]
    assert [int(count) for count in counts] == [5, 5]
    for count in counts:
        count.fill_(9)  # a checkpoint is loaded
    twin = copy.deepcopy(kernel)
    for own in (kernel, twin):
        own.backward(looked_up(own), grad)
        assert own._tbes[0].numbers[-1] == 10
        assert int(own.optimizer_states()[0]["iter"]) == 10
    counts[1].fill_(3)
    with pytest.raises(ValueError, match=r"tables 'a', 'b' have taken \[3, 10\] steps.* Fix: use backend='native'"):
        looked_up(kernel)


# ---- the cache ----


class CachedModule(torch.nn.Module):
    """A stand-in for fbgemm's module with a cache: looks up by locations, as its CUDA kernels do."""

    def __init__(self, rows: int, cols: int, prefetch_pipeline: bool) -> None:
        super().__init__()
        self.table = torch.zeros(rows, cols)
        self.prefetch_pipeline, self.prefetch_stream = prefetch_pipeline, None
        self.timestep, self.timesteps_prefetched, self.lxu_cache_locations_list = 0, list[int](), list[Tensor]()
        self.lxu_cache_state = torch.full((2, 4), -1)
        self.lxu_cache_weights = torch.zeros(8, cols + 4)
        self.lxu_cache_locking_counter = torch.zeros(2, 4)
        self.backwards: list[tuple[list[int], list[int]]] = []
        self.flushes = 0

    def split_embedding_weights(self) -> list[Tensor]:
        return [self.table]

    def split_optimizer_states(self) -> list[tuple[Tensor, ...]]:
        return [()]

    def prefetch(self, ids: Tensor, offsets: Tensor, forward_stream: Any = None) -> None:
        self.timestep += 1
        for row in ids.tolist():
            self.lxu_cache_state.view(-1)[row % 8] = row
            self.lxu_cache_weights[row % 8, : self.table.shape[1]] = self.table[row]
        self.timesteps_prefetched.append(self.timestep)
        self.lxu_cache_locations_list.append((ids % 8).int())

    def forward(self, ids: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        if not self.timesteps_prefetched:
            self.prefetch(ids, offsets)
        self.timesteps_prefetched.pop(0)
        self._indices, self._offsets = ids, offsets
        self.lxu_cache_locations = self.lxu_cache_locations_list.pop(0)
        rows = self.lxu_cache_weights[self.lxu_cache_locations.long(), : self.table.shape[1]].requires_grad_()
        rows.register_hook(lambda _: self.backwards.append((self._indices.tolist(), self.lxu_cache_locations.tolist())))
        return rows * 1

    def flush(self) -> None:
        self.flushes += 1

    def get_uvm_cache_stats(self) -> Tensor:
        return torch.tensor([3, 10, 7, 5, 2, 4])

    def get_cache_miss_counter(self) -> Tensor:
        return torch.tensor([2, 3])


SGD = OptimizerSpec(EmbOptimType.EXACT_SGD, 0.1)


def cached_kernel(monkeypatch: pytest.MonkeyPatch, evict: str) -> FbgemmCachedKernel:
    """A kernel of one table on the CPU, on the stand-in."""
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    def make(kernel: Any, indices: list[int], features: list[int], optimizer: Any) -> CachedModule:
        shard = kernel.shards[indices[0]]
        return CachedModule(shard.num_rows, shard.num_cols, kernel._caches[indices[0]].evict == "lru")

    monkeypatch.setattr(FbgemmCachedKernel, "_make_tbe", make)
    spec = KernelSpec([ShardSpec("t", 100, 4, DataType.FP32, 4)], [0], SGD, pooled=False)
    kernel = FbgemmCachedKernel(spec, [FbgemmCache(0.08, evict)])
    kernel.weights()[0].copy_(torch.arange(100.0)[:, None].expand(100, 4))
    return kernel


def bags(*ids: int) -> KernelInput:
    return KernelInput(torch.tensor(ids), torch.tensor([0, len(ids)]), None, [len(ids)])


def test_a_batch_has_the_rows_that_were_prefetched_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, unlocked = cached_kernel(monkeypatch, "lru"), list[list[int]]()
    unlock = "lxu_cache_locking_counter_decrement"
    monkeypatch.setattr(torch.ops.fbgemm, unlock, lambda _, own: unlocked.append(own.tolist()))
    ahead = kernel.prefetch(bags(11, 12))
    assert kernel.forward(bags(5), False)[0].tolist() == [5.0] * 4
    assert unlocked == [[5]]  # an evaluation in between unlocks its rows
    rows, saved = kernel.forward(bags(11, 12)._replace(prefetched=ahead), True)
    assert rows.tolist() == [11.0] * 4 + [12.0] * 4
    other, also_saved = kernel.forward(bags(7), True)
    kernel.backward(saved, torch.ones_like(rows))
    kernel.backward(also_saved, torch.ones_like(other))
    (tbe,) = kernel._tbes
    assert tbe.backwards == [([11, 12], [3, 4]), ([7], [7])]  # each backward finds the rows of its own batch
    assert (tbe.timesteps_prefetched, tbe.lxu_cache_locations_list) == ([], [])


def test_cached_rows_are_read_anew_after_others_wrote_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = cached_kernel(monkeypatch, "lru")
    ahead = kernel.prefetch(bags(11, 12))
    kernel.flush(0)
    assert kernel._tbes[0].flushes == 1
    assert kernel.prefetch(bags(1)) is None  # others may be writing
    kernel.weights()[0].add_(1000)
    assert kernel.forward(bags(11, 12)._replace(prefetched=ahead), True)[0].tolist() == [1011.0] * 4 + [1012.0] * 4


def test_without_locks_backward_locates_its_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = cached_kernel(monkeypatch, "lfu")
    monkeypatch.setattr(fbgemm_cached, "_locate", lambda tbe, looked: looked.locations.fill_(-1))
    assert kernel.prefetch(bags(1)) is None
    rows, saved = kernel.forward(bags(9, 10), True)
    kernel.backward(saved, torch.ones_like(rows))
    assert kernel._tbes[0].backwards == [([9, 10], [-1, -1])]


def test_counters_of_the_cache_are_fbgemms(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = cached_kernel(monkeypatch, "lru")
    kernel.forward(bags(1), True)
    (counted,) = kernel.counters()
    sizes = {"slots": 8, "slots_in_use": 1}
    moves = {"admissions": 3, "evictions": 2, "staged": 2}
    assert counted == {"lookups": 10, "misses": 5, "hits": 5, **moves, **sizes}
    kernel = cached_kernel(monkeypatch, "lfu")
    kernel.forward(bags(1, 1, 2, 9), True)
    (counted,) = kernel.counters()
    assert counted == {"lookups": 4, "misses": 3, "hits": 1, "slots": 8, "slots_in_use": 2}
    assert kernel.fast_bytes() == (8 * 8 * 4, 0)


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_the_arguments_of_a_cached_module(modules: list[dict[str, Any]], evict: str) -> None:
    real, kernel = fbgemm._fbgemm(), unmade(FbgemmCachedKernel, DataType.FP32)
    kernel._caches, kernel._shard_features = [FbgemmCache(0.25, evict), FbgemmCache(0.5, evict)], [[1, 2], [0]]
    assert kernel._alike() == [[0], [1]]  # a TBE for each table
    for index, features in enumerate([[1, 2], [0]]):
        kernel._make_tbe([index], features, SGD)
    where = (real.EmbeddingLocation.MANAGED_CACHING, real.ComputeDevice.CUDA)
    assert [own["embedding_specs"] for own in modules] == [[(9, 8, *where)], [(7, 8, *where)]]
    assert [own["cache_load_factor"] for own in modules] == [0.25, 0.5]
    assert [own["feature_table_map"] for own in modules] == [[0, 0], [0]]
    recent = evict == "lru"
    for own in modules:
        assert own["cache_algorithm"] is (real.CacheAlgorithm.LRU if recent else real.CacheAlgorithm.LFU)
        assert own["prefetch_pipeline"] is own["gather_uvm_cache_stats"] is recent
        assert own["record_cache_metrics"].record_cache_miss_counter is not recent


@pytest.mark.parametrize(
    ("device", "backend", "cost", "served"),
    [
        ("cuda", None, None, ("fbgemm", True)),
        ("cuda", "native", None, ("native", False)),
        ("cuda", None, EmulatedCost(20), ("native", False)),
        ("cpu", None, None, ("numba", False)),
    ],
)
def test_the_device_chooses_the_cache(
    cuda_build: None, device: str, backend: str | None, cost: EmulatedCost | None, served: tuple[str, bool]
) -> None:
    table, params = EmbeddingBagConfig(100, 8, "t", feature_names=["f"]), CacheParams(cost=cost)
    sharding = ParameterSharding(
        "table_wise", "fused_uvm_caching", cache_params=params, shards=[Shard(0, (0, 100), (0, 8))]
    )
    own: Any = {"pooled": True, "weighted": False, "device": torch.device(device), "backend": backend}
    (kind,), _ = choose_kernels([table], [sharding], [SGD], **own)
    assert (kind.backend, fbgemm_caches(kind.backend, params, torch.device(device))) == served

"""The same comparisons on NVIDIA GPUs: one NCCL rank a GPU."""

import pytest
import torch

import recshard_lab
from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    LaunchError,
    ShardingPlan,
    row_wise,
)
from recshard_lab.comm import ShardingEnv
from recshard_lab.comm.trace import trace
from recshard_lab.distributed import EmbeddingBagCollectionSharder, shard
from recshard_lab.sharding import construct_module_sharding_plan, data_parallel
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cached_jobs, cases
from tests.distributed.jobs import Case, batch_of
from tests.distributed.test_parity import check
from tests.ledger.conftest import skip_without_fbgemm

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
def test_every_scheme_on_a_shared_gpu_equals_the_unsharded_model() -> None:
    steps = cases.random_steps(1, cases.TABLES, 2, steps=5, samples=6)
    with recshard_lab.launch(2, share_gpu=True, devices=[0]) as ranks:
        assert (ranks.backend, {str(device) for device in ranks.devices}) == ("gloo", {"cuda:0"})
        for scheme in scheme_names():
            plan = cases.plan_of(cases.TABLES, [scheme], 2)
            check(Case(cases.TABLES, plan.to_json(), steps, "exact_sgd", backend="native", device="cuda"), ranks)


@pytest.mark.cuda
@needs_gpu
def test_sequences_on_gpus_equal_the_unsharded_model() -> None:
    tables = cases.sequence_tables()
    plan = cases.plan_of(tables, ["row_wise", "column_wise", "table_wise", "data_parallel"], GPUS)
    steps = cases.random_steps(2, tables, GPUS, steps=4, samples=6)
    with recshard_lab.launch(GPUS) as ranks:
        check(Case(tables, plan.to_json(), steps, "exact_sgd", sequence=True, device="cuda"), ranks)


def time_of_ids() -> list[float]:
    """Milliseconds that the exchanges of ids took, of one traced step."""
    table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    sharded = shard(EmbeddingBagCollection([table], device="cuda"), row_wise(), ShardingEnv.default())
    with trace() as traced:
        sharded(batch_of({"f": [[1, 7], [3]]}).to("cuda")).values().sum().backward()
    return [event.ms for event in traced.select(label="input_dist/ids")]


@pytest.mark.cuda
@pytest.mark.skipif(GPUS < 2, reason="one rank exchanges nothing")
def test_a_trace_times_nccl_on_the_device() -> None:
    with recshard_lab.launch(GPUS) as ranks:
        for taken in ranks.run(time_of_ids):
            assert taken
            assert all(0 < ms < 5000 for ms in taken)


def replicas_after_steps(device: str, backend: str | None, optimizer: str) -> dict[str, torch.Tensor]:
    """This rank's copy of a replicated table whose first row is used thousands of times a batch, and its states."""
    table = EmbeddingBagConfig(40_000, 64, name="t", feature_names=["a"])
    plan = construct_module_sharding_plan(EmbeddingBagCollection([table]), {"t": data_parallel()}, world_size=2)
    fused = {"optimizer": optimizer, "learning_rate": 0.1}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused, backend=backend)
    model = EmbeddingBagCollection([table])
    dmp = DistributedModelParallel(model, device=device, plan=ShardingPlan({"": plan}), sharders=[sharder])
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(5):
        ids = torch.randint(40_000, (8192, 4), generator=generator)
        ids[:, 0] = 0
        batch = KeyedJaggedTensor(["a"], ids.view(-1), lengths=torch.full((8192,), 4)).to(torch.device(device))
        rows = dmp(batch).values()
        (rows * torch.randn(rows.shape, generator=generator).to(device)).sum().backward()
    (shards,) = dmp.table_shards().values()
    return {part.name: matrix.cpu() for part in shards.parts() for matrix in shards.matrices(part).values()}


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad"])
@pytest.mark.parametrize("backend", ["native", None])
def test_replicas_on_gpus_are_equal_to_the_last_bit(backend: str | None, optimizer: str) -> None:
    with recshard_lab.launch(2, share_gpu=True, devices=[0]) as ranks:
        one, other = ranks.run(replicas_after_steps, "cuda:0", backend, optimizer)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


WIDE = {"num_embeddings": 20_000, "embedding_dim": 12, "name": "t", "feature_names": ["f"]}


def first_weights(plan_json: str) -> dict[str, torch.Tensor]:
    """The tables of a new model, whole."""
    torch.manual_seed(3)
    meta = EmbeddingBagCollection([EmbeddingBagConfig(**WIDE)], device=torch.device("meta"))
    module = torch.nn.ModuleDict({"collection": meta})
    model = DistributedModelParallel(module, plan=ShardingPlan.from_json(plan_json))
    return {name: value.cpu() for name, value in model.full_state_dict().items()}


@pytest.mark.cuda
@needs_gpu
def test_gpus_draw_the_same_first_weights_under_every_plan() -> None:
    with recshard_lab.launch(2, share_gpu=True, devices=[0]) as ranks:
        found = [
            ranks.run(first_weights, cases.plan_of([WIDE], [scheme], 2).to_json())[0]
            for scheme in ("table_wise", "row_wise", "column_wise", "data_parallel")
        ]
    (whole,) = found[0].values()
    assert whole.unique().numel() > 200_000
    for one in found[1:]:
        assert torch.equal(next(iter(one.values())), whole)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("algorithm", ["lru", "lfu"])
@pytest.mark.parametrize("scheme", ["table_wise", "row_wise"])
def test_fbgemms_cache_gives_the_bits_of_its_fused_kernel(scheme: str, algorithm: str) -> None:
    skip_without_fbgemm()
    with recshard_lab.launch(GPUS) as ranks:
        for different, counted in ranks.run(cached_jobs.compared, scheme, "exact_row_wise_adagrad", algorithm):
            assert different == []
            for own in counted:
                assert own["hits"] + own["misses"] == own["lookups"] > 0
                assert 0 < own["slots_in_use"] <= own["slots"]
                assert algorithm == "lfu" or own["admissions"] > 0


def caches(algorithm: str, backend: str | None) -> tuple[list[str], list[torch.Tensor]]:
    """The class of each cache, and the tables after some steps."""
    plan = cached_jobs.cached_plan("table_wise", algorithm)
    model = cached_jobs.model_of(plan, "exact_sgd", backend)
    for batch in cached_jobs.batches(8):
        model(batch.to(model.device)).values().pow(2).sum().backward()
    kinds = [type(group.kernel).__name__ for group in model.collections[""].executor.lookup.groups]
    return kinds, [own.cpu() for shards in model.table_shards().values() for own in shards.local_weights.values()]


@pytest.mark.cuda
@needs_gpu
def test_fbgemms_cache_trains_as_our_own() -> None:
    skip_without_fbgemm()
    with recshard_lab.launch(1) as ranks:
        ((theirs, one),) = ranks.run(caches, "lru", None)
        ((ours, other),) = ranks.run(caches, "lru", "native")
    assert (set(theirs), set(ours)) == ({"FbgemmCachedKernel"}, {"CachedKernel"})
    for own, expected in zip(one, other, strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.cuda
@needs_gpu
def test_a_pipeline_prefetches_into_fbgemms_cache() -> None:
    skip_without_fbgemm()
    with recshard_lab.launch(GPUS) as ranks:
        for different, rewritten, counted, prefetched in ranks.run(cached_jobs.piped, None):
            assert (different, rewritten, prefetched) == ([], [], 7)
            assert all(own["hits"] > 0 for own in counted)


def test_more_nccl_ranks_than_gpus_are_refused_with_the_number_of_gpus() -> None:
    has = f"{GPUS} GPU" if GPUS else "no GPU"
    with pytest.raises(LaunchError, match=rf"n={GPUS + 1}, backend='nccl'.*this machine has {has}.*Fix: "):
        recshard_lab.launch(GPUS + 1, backend="nccl")

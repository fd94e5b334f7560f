"""Sharded managed collision against the unsharded module with the same buckets: owners, rows, resets, checkpoints."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recshard_lab import (
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    KeyedJaggedTensor,
    PoolingType,
    ShardingPlan,
)
from recshard_lab.distributed import (
    DMPCollection,
    EmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingBagCollectionSharder,
)
from recshard_lab.distributed.state.checkpoint import load_checkpoint, save_checkpoint
from recshard_lab.embedding import (
    DistanceLFU_EvictionPolicy,
    FusedEmbeddingCollection,
    HashZchEvictionPolicyName,
    HashZchManagedCollisionModule,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
)
from recshard_lab.sharding import column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise
from tests.distributed.cached_jobs import world
from tests.distributed.jobs import attempted
from tests.distributed.test_dynamic import OPTIMIZERS, batch_of, local, rows_of

SAMPLES, BUCKETS = 6, 4
ROWS = {"user": 64, "item": 128}
MODULES: dict[str, Callable[[str, int], Any]] = {
    "mch": lambda table, buckets: MCHManagedCollisionModule(
        ROWS[table], "cpu", DistanceLFU_EvictionPolicy(), 2, buckets=buckets
    ),
    "zch": lambda table, buckets: HashZchManagedCollisionModule(
        ROWS[table], "cpu", buckets, name=table, eviction_policy_name=HashZchEvictionPolicyName.LRU_EVICTION
    ),
}


def collection(
    pooled: bool,
    module: str,
    optimizer: str,
    buckets: int = BUCKETS,
    data_type: DataType = DataType.FP64,
    weighted: bool = False,
) -> Any:
    """In FP64, steps that differ in rounding stay together."""
    kind: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    mean = {"pooling": PoolingType.MEAN} if pooled and not weighted else {}
    tables = [
        kind(ROWS["user"], 8, "user", data_type, ["u", "v"]),
        kind(ROWS["item"], 16, "item", data_type, ["w"], **mean),
    ]
    modules = {table.name: MODULES[module](table.name, buckets) for table in tables}
    torch.manual_seed(0)
    inner: Any = FusedEmbeddingBagCollection if pooled else FusedEmbeddingCollection
    outer: Any = ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
    more = {"is_weighted": True} if weighted else {}
    return outer(inner(tables, *OPTIMIZERS[optimizer], **more), ManagedCollisionCollection(modules, tables), True)


def sharded(module: Any, scheme: str, backend: str | None = None) -> DistributedModelParallel:
    _, many = world()
    made: dict[str, Callable[[], Any]] = {
        "row_wise": lambda: row_wise(num_buckets=BUCKETS),
        "table_wise": lambda: table_wise(many - 1),
        "column_wise": lambda: column_wise(list(range(min(2, many)))),
    }
    plan = construct_module_sharding_plan(module, {name: made[scheme]() for name in ROWS}, world_size=many)
    sharders = [ManagedCollisionEmbeddingBagCollectionSharder(backend=backend)] if backend else None
    return DistributedModelParallel(module, plan=ShardingPlan({"": plan}), sharders=sharders)


def batches(count: int, seed: int = 0, many: int | None = None) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """For each feature and rank the lengths and ids, of which there are more than rows."""
    rng, many = torch.Generator().manual_seed(seed), many or world()[1]
    for _ in range(count):
        lengths = torch.randint(0, 1 + 12 // many, (3, many, SAMPLES), generator=rng)
        yield [
            [(own, (torch.randn(int(own.sum()), generator=rng) * 90).long() * 7919**3) for own in of_feature]
            for of_feature in lengths
        ]


def compared(
    reference: Any, dmp: Any, count: int, seed: int, weighted: bool = False, limit: float = 1e-9, trains: bool = True
) -> int:
    """Trains both on the same batches. Returns the evictions of the reference."""
    rank, many = world()
    for parts in batches(count, seed):
        whole, rows = reference(batch_of(parts, range(many), weighted))
        batch = batch_of(parts, range(rank, rank + 1), weighted)
        mine, own_rows = dmp(batch.permute([2, 0, 1]))
        for one, other in zip(local(whole, parts), rows_of(mine), strict=True):
            torch.testing.assert_close(other.detach(), one.detach(), rtol=limit, atol=limit)
        assert own_rows.keys() == rows.keys() == batch.keys()
        assert torch.equal(own_rows.lengths(), batch.lengths())
        assert (own_rows.weights_or_none() is not None) == weighted
        for at, key in enumerate("uvw"):
            sizes = [len(ids) for _, ids in parts[at]]
            own = rows[key].values().split(sizes)[rank]
            assert torch.equal(own_rows[key].values(), own)
            assert own.numel() == 0 or 0 <= int(own.min()) <= int(own.max()) < ROWS["item" if key == "w" else "user"]
        if not trains:
            continue
        sum(rows.pow(2).sum() for rows in rows_of(whole)).backward()
        (many * sum(rows.pow(2).sum() for rows in rows_of(mine))).backward()  # gradients are the mean over ranks
    owners = reference.managed_collision_collection.modules_by_table().values()
    return sum(module.counters.evictions for module in owners)


def trained(case: dict[str, Any], scheme: str, backend: str | None) -> int:
    reference = collection(**case)
    dmp = sharded(copy.deepcopy(reference), scheme, backend)
    if backend is None:
        return compared(reference, dmp, 12, 1)
    assert set(dmp.backends().values()) == {backend}
    return compared(reference, dmp, 12, 1, case["weighted"], 1e-4)


def saved(path: str, module: str) -> None:
    reference = collection(True, module, "adam")
    dmp = sharded(copy.deepcopy(reference), "row_wise")
    compared(reference, dmp, 6, 0)
    save_checkpoint(path, dmp)
    whole, expected = dmp.full_state_dict(), reference.state_dict()
    assert list(whole) == list(expected)
    assert all(torch.equal(own, whole[name]) for name, own in expected.items() if "weight" not in name)
    for state in (whole, dmp.state_dict()):
        other = sharded(collection(True, module, "adam"), "row_wise")
        other.load_state_dict(state)
        assert all(torch.equal(own, whole[name]) for name, own in other.full_state_dict().items())


def loaded(path: str, module: str, many: int) -> int:
    """Continues from a checkpoint beside a collection that was trained on the same batches."""
    reference = collection(True, module, "adam")
    dmp = sharded(collection(True, module, "adam"), "table_wise")
    load_checkpoint(path, dmp)
    for parts in batches(6, 0, many):  # those of `saved`
        reference(batch_of(parts, range(many)))[0].values().pow(2).sum().backward()
    load_checkpoint(path, again := collection(True, module, "adam"), optimizer_state=False)
    torch.testing.assert_close(again.state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-9)
    return compared(reference, dmp, 6, 5)


def sharded_with_owners() -> list[int]:
    """Shards a collection that was trained, and goes on beside it."""
    found = []
    for pooled, module, scheme in ((True, "zch", "row_wise"), (True, "mch", "column_wise"), (False, "mch", "row_wise")):
        reference = collection(pooled, next(name for name in MODULES if name.startswith(module)), "sgd")
        for parts in batches(6, 3):
            output, _ = reference(batch_of(parts, range(world()[1])))
            sum(rows.pow(2).sum() for rows in rows_of(output)).backward()
        owned = [each.size for each in reference.managed_collision_collection.modules_by_table().values()]
        assert min(owned) > 20
        found.append(compared(reference, sharded(copy.deepcopy(reference), scheme), 6, 1))
    return found


@pytest.mark.gate
def test_a_module_with_owners_is_sharded_with_them(two: Any) -> None:
    for evictions in two.run(sharded_with_owners):
        assert min(evictions) > 0


@pytest.mark.gate
@pytest.mark.parametrize("module", MODULES)
def test_a_checkpoint_loads_at_another_number_of_ranks(two: Any, tmp_path: Path, module: str) -> None:
    path = str(tmp_path / "run")
    two.run(saved, path, module)
    assert loaded(path, module, 2) > 50


def in_one_bucket(module: str) -> DistributedModelParallel:
    """Of a module of one bucket, which gets one for each row shard."""
    whole = collection(True, module, "sgd", 1)
    plan = construct_module_sharding_plan(whole, dict.fromkeys(ROWS, row_wise()), world_size=world()[1])
    return DistributedModelParallel(whole, plan=ShardingPlan({"": plan}))


def buckets_of_shards() -> list[int]:
    return [table.partitions for table in in_one_bucket("mch").collections[""].tables]  # type: ignore[attr-defined]


def refused() -> list[str]:
    found = []

    def attempt(module: Any, scheme: Any, **more: Any) -> None:
        def build() -> None:
            plan = construct_module_sharding_plan(module, {"user": scheme, "item": table_wise(0)}, world_size=2)
            DistributedModelParallel(module, plan=ShardingPlan({"": plan}), **more)

        found.append(attempted(build))

    attempt(collection(True, "zch", "sgd"), row_wise(sizes=[20, 44]))
    attempt(collection(True, "zch", "sgd"), data_parallel())
    for optimizer, buckets in (("sgd", 1), ("adam", BUCKETS)):
        used = collection(True, "zch", optimizer, buckets)
        batch = KeyedJaggedTensor(["u", "v", "w"], torch.tensor([3]), lengths=torch.tensor([1, 0, 0]))
        used(batch)[0].values().sum().backward()
        attempt(used, row_wise())
    attempt(collection(True, "zch", "sgd"), table_wise(0), sharders=[])
    attempt(collection(True, "zch", "sgd", 1), row_wise(sizes=[20, 44]))
    found.append(attempted(lambda: DMPCollection(collection(True, "zch", "sgd"), "cpu", None, 2, 1, None)))
    whole = collection(True, "zch", "sgd", 1)
    whole(KeyedJaggedTensor(["u", "v", "w"], torch.arange(30), lengths=torch.tensor([10, 10, 10])))
    found.append(attempted(lambda: in_one_bucket("zch").load_state_dict(whole.state_dict())))
    return found


def test_what_a_managed_table_cannot_do_is_refused(two: Any) -> None:
    for found in two.run(refused):
        says = [
            "table 'user': rows (0, 20) of a shard are not whole partitions of 16 rows",
            "its rows cannot be replicated",
            "1 rows have owners in one bucket, and each of 2 row shards would become a bucket",
            "table 'user' was trained, and its optimizer state",
            "the plan names module ''",
            "table 'user' has row shards of 20, 44 rows",
            "the rows of table 'user' belong to ids, which differ between 2 replicas",
            "ids outside of their buckets",
        ]
        assert len(found) == len(says)
        for one, error in zip(says, found, strict=True):
            assert one in error
    assert two.run(buckets_of_shards) == [[2, 2], [2, 2]]


def test_a_planner_finds_a_plan_for_managed_tables() -> None:
    assert set(DistributedModelParallel(collection(True, "zch", "sgd")).plan.plan) == {""}


FP32 = {"module": "zch", "optimizer": "adagrad", "data_type": DataType.FP32}


@pytest.mark.parametrize(
    ("case", "scheme", "backend"),
    [
        ({"module": "zch", "optimizer": "adam"}, "row_wise", None),
        ({"module": "mch", "optimizer": "adagrad"}, "row_wise", None),
        ({"module": "zch", "optimizer": "sgd"}, "table_wise", None),
        ({"module": "mch", "optimizer": "row-wise adagrad"}, "column_wise", None),
        ({"pooled": False, "module": "zch", "optimizer": "adagrad"}, "row_wise", None),
        ({"pooled": False, "module": "mch", "optimizer": "sgd"}, "table_wise", None),
        ({**FP32, "weighted": True}, "row_wise", "native"),
        ({**FP32, "weighted": False}, "column_wise", "native"),
        ({**FP32, "weighted": True}, "row_wise", "numba"),
    ],
)
def test_shards_have_the_owners_and_rows_of_the_whole_table(
    ranks: Any, case: dict[str, Any], scheme: str, backend: str | None
) -> None:
    assert min(ranks.run(trained, {"pooled": True, **case}, scheme, backend)) > 80


def stale() -> tuple[list[str], int]:
    """What new ids read of those whose rows they got, and evictions. The inner collection is a plain one."""
    rank, many = world()
    tables = [EmbeddingBagConfig(8 * many, 4, "t", feature_names=["f"], init_fn=torch.nn.init.ones_)]
    policy = HashZchEvictionPolicyName.LRU_EVICTION
    owners = HashZchManagedCollisionModule(8 * many, "cpu", 1, eviction_policy_name=policy)
    modules = ManagedCollisionCollection({"t": owners}, tables)
    whole = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables), modules)
    adagrad = {"optimizer": "exact_adagrad", "learning_rate": 0.5}
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(adagrad))
    plan = ShardingPlan({"": construct_module_sharding_plan(whole, {"t": row_wise()}, world_size=many)})
    dmp = DistributedModelParallel(whole, plan=plan, sharders=[sharder])
    wrong = []
    for step in range(40):
        ids = torch.arange(3 * (rank == 0)) + 10 * step
        for use in range(2):  # the first reads initial rows, the second what one step made of them
            out, _ = dmp(KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids)))
            given = out.values().detach().clone()
            out.values().sum().backward()
            if not torch.allclose(given, torch.full_like(given, 1.0 - 0.5 * use), atol=1e-4):
                wrong.append(f"step {step}, use {use}: {given.tolist()}")
    kernels = dmp.collections[""].executor.lookup.groups
    return wrong, int(sum(own["evictions"] for group in kernels for own in group.kernel.counters()))


def test_a_new_id_reads_neither_row_nor_optimizer_state_of_the_evicted_one(ranks: Any) -> None:
    found = ranks.run(stale)
    assert all(wrong == [] for wrong, _ in found)
    assert sum(evictions for _, evictions in found) > 50


def moved() -> int:
    """Reshards while training, beside the unsharded collection."""
    reference = collection(True, "zch", "adagrad")
    dmp = sharded(copy.deepcopy(reference), "row_wise")
    compared(reference, dmp, 5, 0)
    other = construct_module_sharding_plan(reference, dict.fromkeys(ROWS, table_wise(0)), world_size=world()[1])
    dmp.reshard(ShardingPlan({"": other}))
    return compared(reference, dmp, 5, 3)


def lookup_fails() -> list[str]:
    """Errors where a rank's lookup fails, which has remapped features to return."""
    dmp, errors = sharded(collection(True, "zch", "sgd"), "row_wise"), []
    rank, many = world()
    kernel = dmp.collections[""].executor.lookup.groups[0].kernel
    if rank == many - 1:
        kernel.forward = None  # type: ignore[method-assign,assignment]
    for parts in batches(1):
        batch = batch_of(parts, range(rank, rank + 1))
        errors.append(attempted(lambda batch=batch: dmp(batch)[0].values().sum().backward()))
    return errors


def test_a_failed_lookup_leaves_no_rank_waiting(ranks: Any) -> None:
    assert all("TypeError" in error for (error,) in ranks.run(lookup_fails))


def test_owners_move_with_their_rows(ranks: Any) -> None:
    assert min(ranks.run(moved)) > 50

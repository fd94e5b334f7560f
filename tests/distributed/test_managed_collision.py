"""Sharded managed collision against the unsharded module with the same buckets: owners, rows, resets, checkpoints."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recshard_lab
from recshard_lab import (
    DataType,
    DistributedModelParallel,
    DMPCollection,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingConfig,
    EmbOptimType,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    HashZchManagedCollisionModule,
    KeyedJaggedTensor,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
    PoolingType,
    RowWiseAdagrad,
    ShardingPlan,
    construct_module_sharding_plan,
)
from recshard_lab.distributed import ManagedCollisionEmbeddingBagCollectionSharder
from recshard_lab.distributed.state.checkpoint import load_checkpoint, save_checkpoint
from recshard_lab.embedding import DistanceLFU_EvictionPolicy, HashZchEvictionPolicyName
from recshard_lab.sharding import column_wise, data_parallel, row_wise, table_wise

SAMPLES, BUCKETS = 6, 4
ROWS = {"user": 64, "item": 128}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "row-wise adagrad": (RowWiseAdagrad, {"lr": 0.1}),
    "adam": (EmbOptimType.ADAM, {"lr": 0.01}),
}
MODULES: dict[str, Callable[[str, int], Any]] = {
    "mch": lambda table, buckets: MCHManagedCollisionModule(
        ROWS[table], "cpu", DistanceLFU_EvictionPolicy(), 2, buckets=buckets
    ),
    "zch": lambda table, buckets: HashZchManagedCollisionModule(
        ROWS[table], "cpu", buckets, name=table, eviction_policy_name=HashZchEvictionPolicyName.LRU_EVICTION
    ),
}


def collection(pooled: bool, module: str, optimizer: str, buckets: int = BUCKETS) -> Any:
    """In FP64, steps that differ in rounding stay together."""
    kind: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    mean = {"pooling": PoolingType.MEAN} if pooled else {}
    tables = [
        kind(ROWS["user"], 8, "user", DataType.FP64, ["u", "v"]),
        kind(ROWS["item"], 16, "item", DataType.FP64, ["w"], **mean),
    ]
    modules = {table.name: MODULES[module](table.name, buckets) for table in tables}
    torch.manual_seed(0)
    inner: Any = FusedEmbeddingBagCollection if pooled else FusedEmbeddingCollection
    outer: Any = ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
    return outer(inner(tables, *OPTIMIZERS[optimizer]), ManagedCollisionCollection(modules, tables))


def world() -> tuple[int, int]:
    running = torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if running else (0, 1)


def sharded(module: Any, scheme: str) -> DistributedModelParallel:
    _, many = world()
    made: dict[str, Callable[[], Any]] = {
        "row_wise": lambda: row_wise(num_buckets=BUCKETS),
        "table_wise": lambda: table_wise(many - 1),
        "column_wise": lambda: column_wise(list(range(min(2, many)))),
    }
    plan = construct_module_sharding_plan(module, {name: made[scheme]() for name in ROWS}, world_size=many)
    return DistributedModelParallel(module, plan=ShardingPlan({"": plan}))


def batches(count: int, seed: int = 0) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """For each feature and rank the lengths and ids, of which there are more than rows."""
    rng, many = torch.Generator().manual_seed(seed), world()[1]
    for _ in range(count):
        lengths = torch.randint(0, 1 + 12 // many, (3, many, SAMPLES), generator=rng)
        yield [
            [(own, (torch.randn(int(own.sum()), generator=rng) * 90).long() * 7919**3) for own in of_feature]
            for of_feature in lengths
        ]


def batch_of(parts: list[list[tuple[Tensor, Tensor]]], ranks: range) -> KeyedJaggedTensor:
    chosen = [parts[feature][rank] for feature in range(3) for rank in ranks]
    lengths = torch.cat([lengths for lengths, _ in chosen])
    return KeyedJaggedTensor(["u", "v", "w"], torch.cat([ids for _, ids in chosen]), lengths=lengths)


def rows_of(output: Any) -> list[Tensor]:
    return [output[key].values() for key in output] if isinstance(output, dict) else [output.values()]


def local(whole: Any, parts: Any) -> list[Tensor]:
    """The part of the unsharded collection's output that belongs to this rank."""
    rank, _ = world()
    if not isinstance(whole, dict):
        return [whole.values()[rank * SAMPLES : (rank + 1) * SAMPLES]]
    sizes = [[len(ids) for _, ids in of_feature] for of_feature in parts]
    return [whole[key].values()[sum(own[:rank]) : sum(own[: rank + 1])] for key, own in zip("uvw", sizes, strict=True)]


def compared(reference: Any, dmp: Any, count: int, seed: int) -> int:
    """Trains both on the same batches. Returns the evictions of the reference."""
    rank, many = world()
    for parts in batches(count, seed):
        whole, _ = reference(batch_of(parts, range(many)))
        mine, _ = dmp(batch_of(parts, range(rank, rank + 1)))
        for one, other in zip(local(whole, parts), rows_of(mine), strict=True):
            torch.testing.assert_close(other.detach(), one.detach(), rtol=1e-9, atol=1e-9)
        sum(rows.pow(2).sum() for rows in rows_of(whole)).backward()
        (many * sum(rows.pow(2).sum() for rows in rows_of(mine))).backward()  # gradients are the mean over ranks
    owners = reference.managed_collision_collection.modules_by_table().values()
    return sum(module.counters.evictions for module in owners)


def trained(pooled: bool, module: str, optimizer: str, scheme: str) -> int:
    reference = collection(pooled, module, optimizer)
    return compared(reference, sharded(copy.deepcopy(reference), scheme), 12, 1)


def saved(path: str, module: str) -> None:
    reference = collection(True, module, "adam")
    dmp = sharded(copy.deepcopy(reference), "row_wise")
    compared(reference, dmp, 6, 0)
    save_checkpoint(path, dmp)


def loaded(path: str, module: str, many: int) -> int:
    """Continues from a checkpoint beside a collection that was trained on the same batches."""
    reference = collection(True, module, "adam")
    dmp = sharded(collection(True, module, "adam"), "table_wise")
    load_checkpoint(path, dmp)
    rng = torch.Generator().manual_seed(0)
    for _ in range(6):  # the batches of `saved`, on `many` ranks
        lengths = torch.randint(0, 1 + 12 // many, (3, many, SAMPLES), generator=rng)
        parts = [
            [(own, (torch.randn(int(own.sum()), generator=rng) * 90).long() * 7919**3) for own in of_feature]
            for of_feature in lengths
        ]
        reference(batch_of(parts, range(many)))[0].values().pow(2).sum().backward()
    return compared(reference, dmp, 6, 5)


@pytest.mark.parametrize("module", MODULES)
def test_a_checkpoint_loads_at_another_number_of_ranks(tmp_path: Path, module: str) -> None:
    path = str(tmp_path / "run")
    for many, function, arguments in ((2, saved, ()), (1, loaded, (2,))):
        with recshard_lab.launch(many) as ranks:
            found = ranks.run(function, path, module, *arguments)
    assert min(found) > 50


def buckets_of_shards() -> tuple[int, ...]:
    """A module of one bucket gets one for each row shard."""
    dmp = DistributedModelParallel(
        module := collection(True, "mch", "sgd", 1),
        plan=ShardingPlan(
            {"": construct_module_sharding_plan(module, dict.fromkeys(ROWS, row_wise()), world_size=world()[1])}
        ),
    )
    return tuple(table.partitions for table in dmp.collections[""].tables)  # type: ignore[attr-defined]


def refused() -> list[str]:
    found = []

    def attempt(module: Any, scheme: Any, **more: Any) -> None:
        try:
            plan = construct_module_sharding_plan(module, {"user": scheme, "item": table_wise(0)}, world_size=2)
            DistributedModelParallel(module, plan=ShardingPlan({"": plan}), **more)
        except ValueError as error:
            found.append(str(error))

    attempt(collection(True, "zch", "sgd"), row_wise(sizes=[20, 44]))
    attempt(collection(True, "zch", "sgd"), data_parallel())
    used = collection(True, "zch", "sgd")
    used(KeyedJaggedTensor(["u", "v", "w"], torch.tensor([3]), lengths=torch.tensor([1, 0, 0])))
    attempt(used, table_wise(0))
    returning = collection(True, "zch", "sgd")
    returning._return_remapped_features = True
    attempt(returning, table_wise(0))
    attempt(collection(True, "zch", "sgd"), table_wise(0), sharders=[])
    try:
        DMPCollection(collection(True, "zch", "sgd"), "cpu", None, 2, 1, None)
    except ValueError as error:
        found.append(str(error))
    return found


def test_what_a_managed_table_cannot_do_is_refused() -> None:
    with recshard_lab.launch(2) as ranks:
        for found in ranks.run(refused):
            says = [
                "table 'user': rows (0, 20) of a shard are not whole partitions of 16 rows",
                "its rows cannot be replicated",
                "1 rows have owners, which would be lost",
                "return_remapped_features=True",
                "the plan names module ''",
                "the rows of table 'user' belong to ids, which differ between 2 replicas",
            ]
            assert len(found) == len(says)
            for one, error in zip(says, found, strict=True):
                assert one in error
        assert ranks.run(buckets_of_shards) == [(2, 2), (2, 2)]


def test_a_planner_finds_a_plan_for_managed_tables() -> None:
    module = collection(True, "zch", "sgd")
    dmp = DistributedModelParallel(module)
    assert set(dmp.plan.plan) == {""}


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda n: f"W{n}")
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    with recshard_lab.launch(request.param) as launched:
        yield launched


@pytest.mark.parametrize(
    ("pooled", "module", "optimizer", "scheme"),
    [
        (True, "zch", "adam", "row_wise"),
        (True, "mch", "adagrad", "row_wise"),
        (True, "zch", "sgd", "table_wise"),
        (True, "mch", "row-wise adagrad", "column_wise"),
        (False, "zch", "adagrad", "row_wise"),
        (False, "mch", "sgd", "table_wise"),
    ],
)
def test_shards_have_the_owners_and_rows_of_the_whole_table(
    ranks: Any, pooled: bool, module: str, optimizer: str, scheme: str
) -> None:
    assert min(ranks.run(trained, pooled, module, optimizer, scheme)) > 100


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


def evaluated() -> bool:
    """Whether evaluation changes nothing."""
    module = collection(True, "zch", "adagrad")
    dmp = sharded(module, "row_wise")
    rank, _ = world()
    for parts in batches(3):
        dmp(batch_of(parts, range(rank, rank + 1)))[0].values().sum().backward()
    before = copy.deepcopy(state_of(dmp))
    dmp.eval()
    for parts in batches(3, 7):
        dmp(batch_of(parts, range(rank, rank + 1)))[0].values().detach()
    return all(torch.equal(own, before[name]) for name, own in state_of(dmp).items())


def state_of(dmp: Any) -> dict[str, Tensor]:
    return {
        f"{table}/{position}/{name}": own
        for table, shards in dmp.table_shards().items()
        for position, states in shards.states.items()
        for name, own in (states | {"weight": shards.local_weights[position]}).items()
    }


def test_evaluation_changes_nothing(ranks: Any) -> None:
    assert all(ranks.run(evaluated))


def moved() -> int:
    """Reshards while training, beside the unsharded collection."""
    reference = collection(True, "zch", "adagrad")
    dmp = sharded(copy.deepcopy(reference), "row_wise")
    compared(reference, dmp, 5, 0)
    other = construct_module_sharding_plan(reference, dict.fromkeys(ROWS, table_wise(0)), world_size=world()[1])
    dmp.reshard(ShardingPlan({"": other}))
    return compared(reference, dmp, 5, 3)


def test_owners_move_with_their_rows(ranks: Any) -> None:
    assert min(ranks.run(moved)) > 50

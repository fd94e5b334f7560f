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
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    EmbeddingShardingPlanner,
    FusedEmbeddingBagCollection,
    KeyedJaggedTensor,
    ParameterConstraints,
    PoolingType,
    ShardingPlan,
    Topology,
)
from recshard_lab.distributed import (
    DMPCollection,
    EmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingBagCollectionSharder,
)
from recshard_lab.distributed.managed_collision import stored_tables
from recshard_lab.distributed.state.checkpoint import load_checkpoint, save_checkpoint
from recshard_lab.embedding import (
    DistanceLFU_EvictionPolicy,
    EmbOptimType,
    FusedEmbeddingCollection,
    HashZchEvictionPolicyName,
    HashZchManagedCollisionModule,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
)
from recshard_lab.optim import RowWiseAdagrad
from recshard_lab.planner.planner import within_sharder
from recshard_lab.planner.search.options import options_of
from recshard_lab.sharding import column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise
from tests.grid import worlds

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


def world() -> tuple[int, int]:
    running = torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if running else (0, 1)


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


def batches(count: int, seed: int = 0) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """For each feature and rank the lengths and ids, of which there are more than rows."""
    rng, many = torch.Generator().manual_seed(seed), world()[1]
    for _ in range(count):
        lengths = torch.randint(0, 1 + 12 // many, (3, many, SAMPLES), generator=rng)
        yield [
            [(own, (torch.randn(int(own.sum()), generator=rng) * 90).long() * 7919**3) for own in of_feature]
            for of_feature in lengths
        ]


def batch_of(parts: list[list[tuple[Tensor, Tensor]]], ranks: range, weighted: bool = False) -> KeyedJaggedTensor:
    chosen = [parts[feature][rank] for feature in range(3) for rank in ranks]
    lengths, ids = torch.cat([lengths for lengths, _ in chosen]), torch.cat([ids for _, ids in chosen])
    weights = 1 + (ids % 5).to(ids.device, torch.float32) / 4 if weighted else None
    return KeyedJaggedTensor(["u", "v", "w"], ids, weights, lengths=lengths)


def rows_of(output: Any) -> list[Tensor]:
    return [output[key].values() for key in output] if isinstance(output, dict) else [output.values()]


def local(whole: Any, parts: Any) -> list[Tensor]:
    """The part of the unsharded collection's output that belongs to this rank."""
    rank, _ = world()
    if not isinstance(whole, dict):
        return [whole.values()[rank * SAMPLES : (rank + 1) * SAMPLES]]
    sizes = [[len(ids) for _, ids in of_feature] for of_feature in parts]
    return [whole[key].values()[sum(own[:rank]) : sum(own[: rank + 1])] for key, own in zip("uvw", sizes, strict=True)]


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


def trained(pooled: bool, module: str, optimizer: str, scheme: str) -> int:
    reference = collection(pooled, module, optimizer)
    return compared(reference, sharded(copy.deepcopy(reference), scheme), 12, 1)


def trained_on(backend: str, weighted: bool, scheme: str) -> int:
    reference = collection(True, "zch", "adagrad", data_type=DataType.FP32, weighted=weighted)
    dmp = sharded(copy.deepcopy(reference), scheme, backend)
    assert set(dmp.backends().values()) == {backend}
    return compared(reference, dmp, 8, 1, weighted, 1e-4)


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


def weights_saved(path: str, module: str) -> None:
    reference = collection(True, module, "adagrad")
    dmp = sharded(copy.deepcopy(reference), "row_wise")
    compared(reference, dmp, 8, 0)
    save_checkpoint(path, dmp)
    whole, expected = dmp.full_state_dict(), reference.state_dict()
    assert list(whole) == list(expected)
    assert all(torch.equal(own, whole[name]) for name, own in expected.items() if "weight" not in name)
    torch.save(whole, f"{path}.pt")


def weights_loaded(path: str, module: str, scheme: str) -> bool:
    """Whether weights alone give the same rows to the same ids, from both forms."""
    whole = torch.load(f"{path}.pt")
    reference = collection(True, module, "adagrad")
    reference.load_state_dict(whole)
    load_checkpoint(path, again := collection(True, module, "adagrad"), optimizer_state=False)
    equal = [torch.equal(own, whole[name]) for name, own in again.state_dict().items()]
    from_file, from_state = (sharded(collection(True, module, "adagrad"), scheme) for _ in range(2))
    load_checkpoint(path, from_file, optimizer_state=False)
    from_state.load_state_dict(whole)
    for dmp in (from_file, from_state):
        state = dmp.full_state_dict()
        equal += [list(state) == list(whole), *(torch.equal(own, whole[name]) for name, own in state.items())]
        from_state.load_state_dict(from_file.state_dict())
        reference.eval(), dmp.eval()
        with torch.no_grad():
            compared(reference, dmp, 2, 0, trains=False)
    return all(equal)


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
def test_a_module_with_owners_is_sharded_with_them() -> None:
    with recshard_lab.launch(2) as ranks:
        for evictions in ranks.run(sharded_with_owners):
            assert min(evictions) > 0


@pytest.mark.gate
@pytest.mark.parametrize("module", MODULES)
def test_weights_alone_have_the_owners_of_rows(tmp_path: Path, module: str) -> None:
    path = str(tmp_path / "run")
    with recshard_lab.launch(2) as ranks:
        ranks.run(weights_saved, path, module)
    for many, scheme in ((1, "table_wise"), (3, "row_wise")):
        with recshard_lab.launch(many) as ranks:
            assert all(ranks.run(weights_loaded, path, module, scheme))


def other_buckets() -> str:
    """The error where weights of one bucket are loaded into shards that are two."""
    whole = collection(True, "zch", "sgd", 1)
    whole(KeyedJaggedTensor(["u", "v", "w"], torch.arange(30), lengths=torch.tensor([10, 10, 10])))
    module = collection(True, "zch", "sgd", 1)
    plan = construct_module_sharding_plan(module, dict.fromkeys(ROWS, row_wise()), world_size=world()[1])
    dmp = DistributedModelParallel(module, plan=ShardingPlan({"": plan}))
    with pytest.raises(RuntimeError) as error:
        dmp.load_state_dict(whole.state_dict())
    return str(error.value)


def test_weights_of_other_buckets_are_refused() -> None:
    with recshard_lab.launch(2) as ranks:
        for error in ranks.run(other_buckets):
            assert "ids outside of their buckets" in error


@pytest.mark.gate
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
    for optimizer, buckets in (("sgd", 1), ("adam", BUCKETS)):
        used = collection(True, "zch", optimizer, buckets)
        batch = KeyedJaggedTensor(["u", "v", "w"], torch.tensor([3]), lengths=torch.tensor([1, 0, 0]))
        used(batch)[0].values().sum().backward()
        attempt(used, row_wise())
    attempt(collection(True, "zch", "sgd"), table_wise(0), sharders=[])
    attempt(collection(True, "zch", "sgd", 1), row_wise(sizes=[20, 44]))
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
                "1 rows have owners in one bucket, and each of 2 row shards would become a bucket",
                "table 'user' was trained, and its optimizer state",
                "the plan names module ''",
                "table 'user' has row shards of 20, 44 rows",
                "the rows of table 'user' belong to ids, which differ between 2 replicas",
            ]
            assert len(found) == len(says)
            for one, error in zip(says, found, strict=True):
                assert one in error
        assert ranks.run(buckets_of_shards) == [(2, 2), (2, 2)]


ODD = {"prime": (61, 1), "odd": (63, 1), "least": (5, 1), "buckets": (65, 5), "of 7": (49, 7)}


def odd_tables(kind: str) -> ManagedCollisionEmbeddingBagCollection:
    tables = [EmbeddingBagConfig(rows, 8, name, feature_names=[name]) for name, (rows, _) in ODD.items()]
    modules: dict[str, Any] = {}
    for name, (rows, buckets) in ODD.items():
        if kind == "mch":
            modules[name] = MCHManagedCollisionModule(rows, "cpu", DistanceLFU_EvictionPolicy(), 1, buckets=buckets)
        else:
            more = {"opt_in_prob": 50, "percent_reserved_slots": 20}
            modules[name] = HashZchManagedCollisionModule(rows, "cpu", buckets, **more)
    inner = FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.1})
    return ManagedCollisionEmbeddingBagCollection(inner, ManagedCollisionCollection(modules, tables))


@pytest.mark.parametrize("many", [2, 3, 4])
@pytest.mark.parametrize("kind", ["mch", "zch"])
def test_a_planner_compares_only_cuts_that_a_sharder_accepts(kind: str, many: int) -> None:
    whole = odd_tables(kind)
    sharder, tables = ManagedCollisionEmbeddingBagCollectionSharder(), whole.planned_configs()
    row_cuts: dict[str, set[int]] = {name: set() for name in ODD}
    for local in {many, 2} if many % 2 == 0 else {many}:
        topology = Topology(many, local_world_size=local)
        limits = within_sharder(sharder, tables, {}, "cpu")
        model = EmbeddingShardingPlanner(topology, constraints=limits).model(tables)
        for table, options in zip(tables, options_of(model, tables, limits), strict=True):
            params = {name: table_wise(0) for name in ODD}
            for option in options:
                tiles = option.proposal.rects
                ranks = option.proposal.assignments[0] if option.proposal.assignments else range(len(tiles))
                cut = option.proposal.placed([rank % many for rank in ranks])
                plan = construct_module_sharding_plan(
                    whole, params | {table.name: lambda *_, own=cut: own}, world_size=many
                )
                for stored in stored_tables(whole, plan, many):
                    for shard in plan[stored.name].shards:
                        stored.module.rebuild_with_output_id_range(shard.rows, stored.edges)
                row_cuts[table.name].add(len({rows for rows, _ in tiles}))
    equal = next((n for n in range(many, 1, -1) if 63 % n == 0), 1)
    assert max(row_cuts["odd"]) == equal
    assert max(row_cuts["prime"]) == max(row_cuts["least"]) == 1
    assert max(row_cuts["buckets"]) == {2: 2, 3: 3, 4: 3}[many]
    assert max(row_cuts["of 7"]) == many


def trains_a_planned_model() -> int:
    whole = odd_tables("zch")
    limits = {name: ParameterConstraints(sharding_types=["row_wise"]) for name in ("odd", "buckets", "of 7")}
    planner = EmbeddingShardingPlanner(Topology(world()[1]), constraints=limits)
    plan = planner.plan(whole, [ManagedCollisionEmbeddingBagCollectionSharder()])
    dmp = DistributedModelParallel(whole, plan=plan)
    ids = torch.arange(20) * 10**9 + world()[0]
    for _ in range(2):
        batch = KeyedJaggedTensor(list(ODD), ids, lengths=torch.full((10,), 2))
        dmp(batch)[0].values().sum().backward()
    return len(plan.tables()["odd"].shards)


@pytest.mark.gate
def test_a_planner_finds_a_plan_for_managed_tables() -> None:
    assert set(DistributedModelParallel(collection(True, "zch", "sgd")).plan.plan) == {""}
    with recshard_lab.launch(3) as ranks:
        assert ranks.run(trains_a_planned_model) == [3, 3, 3]


@pytest.fixture(scope="module", params=worlds(1, 2, 4))
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


@pytest.mark.parametrize(
    ("backend", "weighted", "scheme"),
    [("native", True, "row_wise"), ("native", False, "column_wise"), ("numba", True, "row_wise")],
)
def test_shards_of_other_kernels_and_weighted_batches(ranks: Any, backend: str, weighted: bool, scheme: str) -> None:
    assert min(ranks.run(trained_on, backend, weighted, scheme)) > 50


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


def lookup_fails() -> list[str]:
    """Errors where a rank's lookup fails, which has remapped features to return."""
    dmp, errors = sharded(collection(True, "zch", "sgd"), "row_wise"), []
    rank, many = world()
    kernel = dmp.collections[""].executor.lookup.groups[0].kernel
    if rank == many - 1:
        kernel.forward = None  # type: ignore[method-assign,assignment]
    for parts in batches(1):
        try:
            dmp(batch_of(parts, range(rank, rank + 1)))[0].values().sum().backward()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_a_failed_lookup_leaves_no_rank_waiting(ranks: Any) -> None:
    assert all("TypeError" in error for (error,) in ranks.run(lookup_fails))


def test_owners_move_with_their_rows(ranks: Any) -> None:
    assert min(ranks.run(moved)) > 50

"""Sharded dynamic tables against the unsharded collection: outputs, evictions, moves and checkpoints."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recshard_lab import (
    DataType,
    DistributedModelParallel,
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    DynamicEmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    ShardingPlan,
)
from recshard_lab.distributed.state.checkpoint import load_checkpoint, save_checkpoint
from recshard_lab.embedding import EmbOptimType
from recshard_lab.optim import GradientClipping, GradientClippingOptimizer, RowWiseAdagrad
from recshard_lab.sharding import (
    EmbeddingModuleShardingPlan,
    Topology,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    scheme_named,
    table_wise,
)
from tests.distributed.cached_jobs import world
from tests.distributed.jobs import attempted
from tests.grid import on_ranks

SAMPLES = 8
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "row-wise adagrad": (RowWiseAdagrad, {"lr": 0.1}),
    "adam": (EmbOptimType.ADAM, {"lr": 0.01}),
}


def tables(**more: Any) -> list[DynamicEmbeddingConfig]:
    """Of 1,024 and 2,048 rows, in 8 partitions. In FP64, steps that differ in rounding stay together."""
    more = {"data_type": DataType.FP64} | more
    return [
        DynamicEmbeddingConfig("user", 8, 1024, feature_names=["u", "v"], evict="lfu", **more),
        DynamicEmbeddingConfig("item", 16, 2048, feature_names=["u"], pooling=PoolingType.MEAN, **more),
    ]


def collection(kind: str, optimizer: str, **more: Any) -> Any:
    which = DynamicEmbeddingBagCollection if kind == "pooled" else DynamicEmbeddingCollection
    return which(tables(**more), *OPTIMIZERS[optimizer])


ADMISSIONS: dict[str, dict[str, Any]] = {"all": {}, "frequent": {"admit": 3}, "random": {"admit": 0.4}}


def plan_of(module: Any, name: str) -> ShardingPlan:
    ranks = world()[1]
    buckets = {table.name: table.partitions for table in tables()}
    made: dict[str, Callable[[str], Any]] = {
        "row_wise": lambda table: row_wise(),
        "buckets": lambda table: row_wise(num_buckets=buckets[table]),
        "table_wise": lambda table: table_wise(ranks - 1),
        "column_wise": lambda table: column_wise(list(range(min(2, ranks)))),
    }
    chosen = {table: made[name](table) for table in buckets}
    return ShardingPlan({"": construct_module_sharding_plan(module, chosen, world_size=ranks)})


def batches(count: int, world: int, seed: int = 0) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """For each feature and rank the lengths ``[SAMPLES]`` and ids, of which there are more than rows."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = torch.randint(0, 6 * 4 // world, (2, world, SAMPLES), generator=rng)
        yield [
            [(own, (torch.randn(int(own.sum()), generator=rng) * 1500).long() * 7919) for own in of_feature]
            for of_feature in lengths
        ]


def batch_of(parts: list[list[tuple[Tensor, Tensor]]], ranks: range, weighted: bool = False) -> KeyedJaggedTensor:
    chosen = [of_feature[rank] for of_feature in parts for rank in ranks]
    lengths, ids = torch.cat([lengths for lengths, _ in chosen]), torch.cat([ids for _, ids in chosen])
    weights = 1 + (ids % 5).to(torch.float32) / 4 if weighted else None
    return KeyedJaggedTensor(list("uvw"[: len(parts)]), ids, weights, lengths=lengths)


def rows_of(output: Any) -> list[Tensor]:
    return [output[key].values() for key in output] if isinstance(output, dict) else [output.values()]


def local(whole: Any, parts: list[list[tuple[Tensor, Tensor]]]) -> list[Tensor]:
    """The part of the unsharded collection's output that belongs to this rank."""
    rank, _ = world()
    if not isinstance(whole, dict):
        return list(whole.values().split(len(parts[0][0][0]))[rank : rank + 1])
    sizes = {key: [len(ids) for _, ids in of_feature] for key, of_feature in zip("uvw", parts, strict=False)}
    return [whole[key].values().split(sizes[key[0]])[rank] for key in whole]


def compared(reference: Any, dmp: Any, count: int, seed: int) -> int:
    """Trains both on the same batches. Returns the evictions of the reference."""
    rank, ranks = world()
    for parts in batches(count, ranks, seed):
        whole, mine = reference(batch_of(parts, range(ranks))), dmp(batch_of(parts, range(rank, rank + 1)))
        expected, found = local(whole, parts), rows_of(mine)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other.detach(), one.detach(), rtol=1e-9, atol=1e-9)
        sum(rows.pow(2).sum() for rows in rows_of(whole)).backward()
        (ranks * sum(rows.pow(2).sum() for rows in found)).backward()  # gradients are the mean over ranks
    return sum(own["fast"]["evictions"] for own in reference.counters().values())


def trained(kind: str, optimizer: str, scheme: str, admission: str = "all") -> int:
    module = collection(kind, optimizer, **ADMISSIONS[admission])
    dmp = DistributedModelParallel(module, plan=None if scheme == "planned" else plan_of(module, scheme))
    return compared(collection(kind, optimizer, **ADMISSIONS[admission]), dmp, 20, 1)


def saved(folder: str) -> None:
    """Writes a checkpoint for each admission."""
    for admission, more in ADMISSIONS.items():
        module = collection("pooled", "adam", **more)
        dmp = DistributedModelParallel(module, plan=plan_of(module, "row_wise"))
        compared(collection("pooled", "adam", **more), dmp, 10, 0)
        save_checkpoint(f"{folder}/{admission}", dmp)


def loaded(folder: str, many: int) -> list[int]:
    """Continues from each checkpoint beside a collection trained on the same batches. Returns rows that it inserted."""
    found = []
    for admission, more in ADMISSIONS.items():
        module, reference = collection("pooled", "adam", **more), collection("pooled", "adam", **more)
        for parts in batches(10, many, 0):
            reference(batch_of(parts, range(many))).values().pow(2).sum().backward()
        dmp = DistributedModelParallel(module, plan=plan_of(module, "table_wise"))
        load_checkpoint(f"{folder}/{admission}", dmp)
        before = reference.table("user").counters.inserts
        compared(reference, dmp, 6, 5)
        found.append(reference.table("user").counters.inserts - before)
    return found


@pytest.mark.gate
def test_a_checkpoint_loads_at_another_number_of_ranks_with_what_admission_has_counted(
    four: Any, tmp_path: Path
) -> None:
    """From four ranks into one process; dumps of `test_dynamic_dumps` also go the other way."""
    four.run(saved, str(tmp_path))
    assert min(loaded(str(tmp_path), 4)) > 5


def refused() -> list[str]:
    """Errors of shards that are no whole partitions, of replicas, and of a table with rows."""

    def build(scheme: Any) -> None:
        module = collection("pooled", "sgd")
        plan = construct_module_sharding_plan(module, {"user": scheme, "item": table_wise(0)}, world_size=2)
        DistributedModelParallel(module, plan=ShardingPlan({"": plan}))

    module = collection("pooled", "sgd")
    module(KeyedJaggedTensor(["u", "v"], torch.tensor([3]), lengths=torch.tensor([1, 0])))
    return [
        attempted(lambda: build(row_wise(sizes=[1000, 24]))),
        attempted(lambda: build(data_parallel())),
        attempted(lambda: DistributedModelParallel(module, plan=plan_of(module, "table_wise"))),
    ]


def test_what_a_dynamic_table_cannot_do_is_refused(two: Any) -> None:
    for partitions, replicas, trained in two.run(refused):
        assert "table 'user': rows (0, 1000) of a shard are not whole partitions of 128 rows" in partitions
        assert "Fix: use multiples of 128, as row_wise() does" in partitions
        assert "table 'user' is dynamic: its rows cannot be replicated" in replicas
        assert "dynamic table 'user' has rows, which would be lost" in trained


def trained_everywhere() -> list[int]:
    """Trains under every scheme that the planner offers, and every output path of row shards, on two nodes."""
    found, nodes = [], Topology(4, local_world_size=2)
    for scheme, route in [*((scheme, "direct") for scheme in SCHEMES), ("row_wise", "reduce_scatter"),
                          ("row_wise", "two_hop"), ("grid_shard", "two_hop")]:  # fmt: skip
        made = {table.name: scheme_named(scheme).default(table, nodes).with_route(route) for table in tables()}
        module, reference = collection("pooled", "adagrad"), collection("pooled", "adagrad")
        dmp = DistributedModelParallel(module, plan=ShardingPlan({"": EmbeddingModuleShardingPlan(made)}))
        found.append(compared(reference, dmp, 8, 1))
    return found


@pytest.mark.gate
def test_every_scheme_and_output_path_of_the_planner_trains_as_the_whole_table(nodes: Any) -> None:
    for evictions in nodes.run(trained_everywhere):
        assert min(evictions) > 50


@on_ranks(
    *(2, 3),
    kind=["pooled", "sequence"],
    trained_with=[
        "row_wise, sgd",
        "row_wise, adam",
        "buckets, adagrad",
        "planned, adagrad",
        "table_wise, adagrad",
        "column_wise, adagrad",
        "column_wise, row-wise adagrad",
    ],
)
def test_shards_train_as_the_whole_table_and_evict_the_same_ids(ranks: Any, kind: str, trained_with: str) -> None:
    scheme, optimizer = trained_with.split(", ")
    for evictions in ranks.run(trained, kind, optimizer, scheme):
        assert evictions > 500


SCHEMES = ["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard"]


def evaluated() -> tuple[bool, list[float]]:
    """Whether evaluation changes nothing, and the rows of an absent id."""
    module = collection("pooled", "sgd", weight_init_min=1.0, weight_init_max=1.0)
    dmp = DistributedModelParallel(module, plan=plan_of(module, "row_wise"))
    rank, ranks = world()
    for parts in batches(3, ranks):
        dmp(batch_of(parts, range(rank, rank + 1))).values().sum().backward()
    before = {name: value.clone() for name, value in index_of(dmp).items()}
    dmp.eval()
    batch = KeyedJaggedTensor(["u", "v"], torch.tensor([10**17 + rank]), lengths=torch.tensor([0, 1, 0, 0]))
    out = dmp(batch).values()
    out.sum().backward()
    with torch.no_grad():
        dmp.train()(batch)
    return all(torch.equal(before[name], value) for name, value in index_of(dmp).items()), out[1, :8].tolist()


def index_of(dmp: Any) -> dict[str, Tensor]:
    """This rank's weights, optimizer states and indexes."""
    found = {}
    for table, shards in dmp.module.table_shards().items():
        for part in shards.parts():
            for position, matrix in shards.matrices(part).items():
                found[f"{table}.{part.name}.{position}"] = matrix
    return found


def test_evaluation_and_lookups_without_gradients_change_nothing(two: Any) -> None:
    for unchanged, row in two.run(evaluated):
        assert unchanged
        assert row == [1.0] * 8


def walked(optimizer: str, plans: list[str]) -> list[int]:
    """Trains on each plan in turn, moving between them."""
    module = collection("pooled", optimizer)
    dmp = DistributedModelParallel(module, plan=plan_of(module, plans[0]))
    reference = collection("pooled", optimizer)
    found = []
    for number, plan in enumerate(plans):
        if number:
            dmp.reshard(plan_of(module, plan))
        found.append(compared(reference, dmp, 8, number))
    return found


def walked_with_admission() -> None:
    for admission, more in ADMISSIONS.items():
        module, reference = (collection("pooled", "sgd", **more) for _ in range(2))
        dmp = DistributedModelParallel(module, plan=plan_of(module, "row_wise"))
        compared(reference, dmp, 6, 0)
        dmp.reshard(plan_of(module, "table_wise"))
        refused = reference.table("user").counters.refusals
        compared(reference, dmp, 6, 1)
        assert (reference.table("user").counters.refusals > refused) == (admission != "all")


def test_a_table_moves_with_what_admission_has_counted(two: Any) -> None:
    two.run(walked_with_admission)


@pytest.mark.parametrize("optimizer", ["row-wise adagrad", "adam"])
def test_a_table_moves_with_its_index(ranks: Any, optimizer: str) -> None:
    for evictions in ranks.run(walked, optimizer, ["row_wise", "table_wise", "column_wise", "row_wise"]):
        assert evictions[-1] > evictions[0] > 0


def watched_norms(norm_type: float) -> tuple[float, float]:
    """The norm of the gradient of two tables that have the same ids: as the optimizer computes it, and by hand."""
    rank, many = world()
    names, samples = ["a", "b"], 30
    module = DynamicEmbeddingBagCollection(
        [DynamicEmbeddingConfig(name, 4, 1024, feature_names=[name]) for name in names], torch.optim.SGD, {"lr": 0.1}
    )
    plan = {name: row_wise() for name in names}
    dmp = DistributedModelParallel(
        module, plan=ShardingPlan({"": construct_module_sharding_plan(module, plan, world_size=many)})
    )
    optimizer = GradientClippingOptimizer(dmp.fused_optimizer, GradientClipping.NORM, 1e9, norm_type)
    # ids beyond a table's rows, and ids that are as far apart as a shard has rows
    ids = torch.randint(-2000, 2000, (many, 2, samples), generator=torch.Generator().manual_seed(1))
    ids[:, :, :4] = 2**40 + torch.arange(4)
    grads = torch.arange(many * samples * 8.0).view(many, samples, 8)
    lengths = torch.ones(2 * samples, dtype=torch.long)
    output = dmp(KeyedJaggedTensor(names, ids[rank].flatten(), lengths=lengths)).values()
    (output * grads[rank]).sum().backward()
    optimizer.step()
    power = []
    for table in range(2):
        _, row = ids[:, table].reshape(-1).unique(return_inverse=True)
        own = grads[:, :, 4 * table : 4 * table + 4].reshape(-1, 4) / many
        power.append(torch.zeros(len(row), 4).index_add(0, row, own))
    assert optimizer.last_total_grad_norm is not None
    return float(optimizer.last_total_grad_norm), float(torch.linalg.vector_norm(torch.cat(power), norm_type))


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_norm_of_gradients_keeps_tables_with_the_same_ids_apart(ranks: Any, norm_type: float) -> None:
    for watched, expected in ranks.run(watched_norms, norm_type):
        assert watched == pytest.approx(expected, rel=1e-5)

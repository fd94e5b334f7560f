"""Share of lookups that read host memory: rows split by measured use, beside splits that ignore it.

Device memory of two ranks has room for a share of the rows. Statistics come from the training batches: pooling factor,
coverage and the curve of accesses of each table (`Workload.measured`), and the order of ids by use (`FrequencyOrder`).
The planner then places hot rows in device memory and the others in host memory. Two ranks look up held-out batches,
and each rank counts the ids of its lookups by memory. The two layouts of even parts hold as many bytes in device memory
as the plan by use. The plan of whole tables has the same limit, and may hold fewer:

- row-wise with UVM: each rank has an even part of each table's rows, and the first of them in device memory;
- random rows: the same with renumbered ids, so that random rows are in device memory;
- whole tables: the planner's plan without statistics by row, for the same device memory. Tables are split evenly.

Ranks are CPU processes. Where a row is stored is real, and so is each count. Times of a GPU are not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import recshard_lab as rs
from benchmarks import Figure
from recshard_lab import mlperf
from recshard_lab.data import FrequencyOrder
from recshard_lab.sharding.plan.types import DDR
from recshard_lab.sharding.schemes.row_wise import row_slices

RANKS, BATCH, DIM = 2, 256, 16
TRAIN, HELD_OUT = 320, 64  # batches
SHARES = (0.1, 0.3)  # of the rows that device memory has room for
SEED = 7
NO_FIXED_COSTS: dict[str, Any] = dict.fromkeys(
    ("launch_ms", "kernel_ms", "host_ms", "sync_ms", "intra_host_latency_ms", "peer_ms"), 0.0
)  # batches are a thousandth of production's: launches would hide what a lookup costs
PRODUCTION = (
    (1_000_000, 16),
    (500_000, 16),
    (250_000, 8),
    (1_000_000, 4),
    (100_000, 1),
    (500_000, 1),
)  # rows, ids per bag
ALPHAS = (0.7, 0.9, 1.05, 1.2)
_NOTE = """\
Lookups of held-out batches, counted by the ranks. 'predicted least' is a proved bound by the statistics of training.
These include an estimate for rows that no training batch uses, so the counted share may be below it.
The paper states 87x fewer accesses of host memory (Sethi et al., ASPLOS 2022), on Meta's tables and machines."""


Batches = list[rs.KeyedJaggedTensor]


@dataclass(frozen=True)
class Dataset:
    """Batches of one size.

    Args:
        tables: which read them.
        train, held_out: batches of `BATCH` samples.
    """

    name: str
    tables: list[rs.EmbeddingBagConfig]
    train: Batches
    held_out: Batches


def figures(*, quick: bool = False) -> list[Figure]:
    """For each data set and share of device memory, lookups in host memory by layout. ``quick``: one share."""
    from recshard_lab.launcher import launch

    found = []
    with launch(RANKS, backend="gloo") as ranks:
        for make in (published, zipf, clicks):
            data = make()
            for share in SHARES[: 1 if quick else None]:
                found.append(figure_of(data, share, lambda plan, batches: slow_share(ranks, data, plan, batches)))  # noqa: B023
    return found


def figure_of(data: Dataset, share: float, counted: Callable[[rs.ShardingPlan, Batches], float]) -> Figure:
    """The share of one data set with device memory for `share` of the rows.

    Args:
        counted: counts the share of slow lookups of batches under a plan.
    """
    order = FrequencyOrder.measured(data.train, data.tables)
    load = rs.Workload.measured(map(order, data.train), data.tables, frequency_ordered=True)
    limits = {one.name: rs.ParameterConstraints(compute_kernels=["fused", "fused_uvm"]) for one in data.tables}
    total = sum(one.weight_bytes for one in data.tables)
    messages = 4 * BATCH * (sum(load.pooling_factor(one.feature_names[0]) + DIM for one in data.tables)) * RANKS
    room: dict[str, Any] = {"hbm_cap": int(share * total / RANKS + messages), "ddr_cap": 4 * total}
    where = rs.Topology(RANKS, "cuda", **room, reserve_fraction=0.0, **NO_FIXED_COSTS)
    planner = rs.EmbeddingShardingPlanner(where, workload=load, constraints=limits)
    plan = planner.plan_tables(data.tables)
    predicted = rs.planner.tier_shares(plan, data.tables, where, load)
    even = rs.Workload.measured(data.train, data.tables)
    whole = rs.EmbeddingShardingPlanner(where, workload=even, constraints=limits).plan_tables(data.tables)
    held = fast_share(plan, data.tables)
    plain = row_wise_uvm(data.tables, held)
    draw = torch.Generator().manual_seed(SEED)
    shuffled = FrequencyOrder(
        {one.name: torch.randperm(one.num_embeddings, generator=draw) for one in data.tables}, order.features
    )
    by_use = counted(plan, [order(batch) for batch in data.held_out])
    uvm = counted(plain, data.held_out)
    beside = {
        "row-wise UVM %": 100 * uvm,
        "random rows %": 100 * counted(plain, [shuffled(batch) for batch in data.held_out]),
        "whole tables %": 100 * counted(whole, data.held_out),
        "predicted %": 100 * predicted.share,
        "predicted least %": 100 * predicted.least,
        "rows in HBM %": 100 * held,
        "step gap %": 100 * (plan.gap or 0.0),
        "fewer than UVM, x": uvm / by_use if by_use else float("inf"),
    }
    return Figure(f"{data.name}, HBM for {share:.0%} of the rows", 100 * by_use, "%", beside=beside, note=_NOTE)


def slow_share(ranks: object, data: Dataset, plan: rs.ShardingPlan, batches: Batches) -> float:
    """The share of lookups that read host memory, counted by the ranks."""
    found = ranks.run(count_lookups, data.tables, plan.to_json(), batches)  # type: ignore[attr-defined]
    fast, slow = np.sum(found, axis=0)
    return float(slow / (fast + slow))


def count_lookups(tables: Sequence[rs.EmbeddingBagConfig], plan: str, batches: Batches) -> tuple[int, int]:
    """On a rank: lookups in device memory and in host memory. Rank r looks up batches r, r + W, ..."""
    import torch.distributed as dist

    model = rs.DistributedModelParallel(
        rs.EmbeddingBagCollection(list(tables), device=torch.device("meta")),
        device=torch.device("cpu"),
        plan=rs.ShardingPlan.from_json(plan),
        sharders=[rs.distributed.EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": 0.1})],
    ).eval()
    seen = {False: 0, True: 0}

    def lookup(group: object, ids: torch.Tensor, counts: list[int]) -> None:
        seen[group.kind.host] += ids.numel()  # type: ignore[attr-defined]

    for collection in model.collections.values():
        collection.listen(lookup)
    with torch.no_grad():
        for batch in batches[dist.get_rank() :: dist.get_world_size()]:
            model(batch).values()
    return seen[False], seen[True]


def fast_share(plan: rs.ShardingPlan, tables: Sequence[rs.EmbeddingBagConfig]) -> float:
    """The share of all weights that is in device memory."""
    shards = [shard for entry in plan.tables().values() for shard in entry.shards]
    fast = sum(shard.num_elements for shard in shards if shard.tier != DDR)
    return fast / sum(one.num_embeddings * one.embedding_dim for one in tables)


def row_wise_uvm(tables: Sequence[rs.EmbeddingBagConfig], fast: float) -> rs.ShardingPlan:
    """Even row shards. The first rows of each are in device memory, a share of `fast`."""
    entries = {}
    for one in tables:
        shards = []
        for rank, ((start, end), cols) in enumerate(row_slices(one, RANKS)):
            middle = start + round(fast * (end - start))
            shards += [rs.Shard(rank, (start, middle), cols)] if middle > start else []
            shards += [rs.Shard(rank, (middle, end), cols, DDR)] if middle < end else []
        entries[one.name] = rs.ParameterSharding("row_wise", shards=shards)
    return rs.ShardingPlan({"": rs.sharding.EmbeddingModuleShardingPlan(entries)})


def published() -> Dataset:
    """Tables whose rows are used as in the histogram that Meta published for 856 tables."""
    return _drawn(
        "published histogram", [rs.planner.AccessProfile.meta_2021(n).row_shares(rows) for rows, n in PRODUCTION]
    )


def zipf() -> Dataset:
    """The same tables with ids of Zipf alpha 0.7 to 1.2."""
    skews = [ALPHAS[i % len(ALPHAS)] for i in range(len(PRODUCTION))]
    curves = [rs.sharding.RowShares.zipf(rows, alpha) for (rows, _), alpha in zip(PRODUCTION, skews, strict=True)]
    return _drawn("Zipf 0.7 to 1.2", curves)


def _drawn(name: str, curves: Sequence[rs.sharding.RowShares]) -> Dataset:
    """Independent ids. The rows are in no order of use."""
    draw = np.random.default_rng(SEED)
    tables = [
        rs.EmbeddingBagConfig(rows, DIM, name=f"t{i}", feature_names=[f"f{i}"])
        for i, (rows, _) in enumerate(PRODUCTION)
    ]
    places = [draw.permutation(rows) for rows, _ in PRODUCTION]
    pooling = [ids for _, ids in PRODUCTION]

    def batch() -> rs.KeyedJaggedTensor:
        lengths = [draw.poisson(ids, BATCH) if ids > 1 else np.ones(BATCH, dtype=np.int64) for ids in pooling]
        values = []
        for curve, place, own in zip(curves, places, lengths, strict=True):
            at = np.interp(draw.random(int(own.sum())), curve.shares, curve.edges)
            values.append(place[np.minimum(at.astype(np.int64), curve.num_rows - 1)])
        return rs.KeyedJaggedTensor(
            [one.feature_names[0] for one in tables],
            torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
        )

    return Dataset(name, tables, [batch() for _ in range(TRAIN)], [batch() for _ in range(HELD_OUT)])


def clicks() -> Dataset:
    """Synthetic clicks in the shape of Criteo's: 26 features, one id each, MLPerf's rows up to 100,000 a table."""
    source = rs.data.SyntheticClicks(
        (TRAIN + HELD_OUT) * BATCH, rows=[min(rows, 100_000) for rows in mlperf.ROWS], seed=SEED
    )
    batches = [source.batch(range(start, start + BATCH)).sparse_features for start in range(0, len(source), BATCH)]
    tables = [
        rs.EmbeddingBagConfig(rows, DIM, name=f"t_{key}", feature_names=[key])
        for rows, key in zip(source.rows, batches[0].keys(), strict=True)
    ]
    return Dataset("synthetic clicks", tables, batches[:TRAIN], batches[TRAIN:])

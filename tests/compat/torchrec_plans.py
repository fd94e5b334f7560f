"""Runs in an environment that has TorchRec: every scheme's plan to and fro, and on four ranks under both libraries.

Prints one line a check, ``ok`` first where it held.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchrec
from torchrec.distributed import sharding_plan as theirs
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recshard_lab
from recshard_lab import sharding as ours
from recshard_lab.compat.plans import from_torchrec, to_torchrec

RANKS, LOCAL = 4, 2
GENERATORS: dict[str, tuple[Any, Any]] = {
    "table_wise": (theirs.table_wise(rank=2), ours.table_wise(rank=2)),
    "row_wise": (theirs.row_wise(), ours.row_wise()),
    "column_wise": (theirs.column_wise(ranks=[3, 1]), ours.column_wise(ranks=[3, 1])),
    "table_row_wise": (theirs.table_row_wise(host_index=1), ours.table_row_wise(host_index=1)),
    "grid_shard": (theirs.grid_shard(host_indexes=[1, 0]), ours.grid_shard(host_indexes=[1, 0])),
    "data_parallel": (theirs.data_parallel(), ours.data_parallel()),
    "table_column_wise": (None, ours.table_column_wise(host_index=1)),
}


def collection(library: Any, rows: int) -> Any:
    tables = [
        library.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=256, feature_names=[name])
        for name in GENERATORS
    ]
    return library.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def told(plan: Any) -> dict[str, Any]:
    """All that a plan of TorchRec's says of where tables lie."""
    return {
        name: (
            entry.sharding_type,
            entry.ranks,
            [(s.shard_offsets, s.shard_sizes, str(s.placement)) for s in entry.sharding_spec.shards]
            if entry.sharding_spec
            else None,
        )
        for name, entry in plan.plan[""].items()
    }


def our_plan(rows: int) -> ours.ShardingPlan:
    generators = {name: own for name, (_, own) in GENERATORS.items()}
    module = collection(recshard_lab, rows)
    made = ours.construct_module_sharding_plan(module, generators, local_size=LOCAL, world_size=RANKS)
    return ours.ShardingPlan({"": made})


def to_and_fro(rows: int) -> None:
    plan = our_plan(rows)
    there = to_torchrec(plan, RANKS, LOCAL)
    say(f"ours comes back, {rows} rows", from_torchrec(there) == plan)
    generators = {name: own for name, (own, _) in GENERATORS.items() if own is not None}
    module = collection(torchrec, rows)
    short = torchrec.EmbeddingBagCollection(
        tables=[t for t in module.embedding_bag_configs() if t.name in generators], device=torch.device("meta")
    )
    made = theirs.construct_module_sharding_plan(
        short, generators, local_size=LOCAL, world_size=RANKS, device_type="cpu", sharder=FusedSharder()
    )
    given = ShardingPlan(plan={"": made})
    for name, entry in told(given).items():
        say(f"{name} is cut as TorchRec cuts it, {rows} rows", told(there)[name] == entry)
    here = from_torchrec(given).resolved(recshard_lab_tables(generators, rows), RANKS, LOCAL)
    again = to_torchrec(here, RANKS, LOCAL)
    say(f"theirs comes back, {rows} rows", told(again) == told(given) and kernels(again) == kernels(given))


class FusedSharder(EmbeddingBagCollectionSharder):
    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["dense" if sharding_type == "data_parallel" else "fused"]


def kernels(plan: Any) -> dict[str, str]:
    return {name: entry.compute_kernel for name, entry in plan.plan[""].items()}


def recshard_lab_tables(names: Any, rows: int) -> list[Any]:
    return [t for t in collection(recshard_lab, rows).embedding_bag_configs() if t.name in names]


def on_a_rank(rank: int, rows: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(LOCAL)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    plan = our_plan(rows)
    ids = torch.arange(2 * len(GENERATORS)) % rows
    lengths = torch.ones(2 * len(GENERATORS), dtype=torch.int64)
    there = to_torchrec(plan, RANKS, LOCAL)
    dmp = torchrec.distributed.DistributedModelParallel(
        collection(torchrec, rows),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=there,
        sharders=[EmbeddingBagCollectionSharder()],
    )
    out = dmp(torchrec.KeyedJaggedTensor(list(GENERATORS), ids, lengths=lengths)).wait()
    lies = all(
        sorted((s.placement.rank(), *s.shard_offsets, *s.shard_sizes) for s in tensor.metadata().shards_metadata)
        == sorted((s.rank, s.rows[0], s.cols[0], s.num_rows, s.num_cols) for s in plan.tables()[name].shards)
        for key, tensor in dmp.state_dict().items()
        for name in [key.split(".")[1]]
        if hasattr(tensor, "metadata")
    )
    own = recshard_lab.DistributedModelParallel(collection(recshard_lab, rows), plan=from_torchrec(there))
    ours_out = own(recshard_lab.KeyedJaggedTensor(list(GENERATORS), ids, lengths=lengths))
    if rank == 0:
        say("TorchRec runs our plan", out.values().shape == (2, 256 * len(GENERATORS)))
        say("and holds the rectangles that it names", lies)
        say("we run theirs", ours_out.values().shape == (2, 256 * len(GENERATORS)) and own.plan == plan)
    dist.barrier()
    dist.destroy_process_group()


def say(what: str, held: bool) -> None:
    print("ok" if held else "NO", what, flush=True)


if __name__ == "__main__":
    for rows in (64, 37, 5):
        to_and_fro(rows)
    mp.spawn(on_a_rank, (64, sys.argv[1]), nprocs=RANKS)

"""Functions of `torchrec.distributed.sharding_plan`, and sharding one module by hand."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed import sharding_plan as P
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.compat.parity.case import case, raised
from tests.compat.parity.sharded_tables import configs, fill

PLAN = "torchrec.distributed.sharding_plan"
SCHEMES = (
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)


def bags(rows: int = 10, dim: int = 256, names: str = "t", device: str = "cpu") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=configs(names, rows, dim), device=torch.device(device))


def shown(entry: ParameterSharding) -> Any:
    spec = entry.sharding_spec
    shards = None if spec is None else [
        [list(own.shard_offsets), list(own.shard_sizes), str(own.placement)] for own in spec.shards
    ]  # fmt: skip
    return [str(getattr(entry.sharding_type, "value", entry.sharding_type)), entry.compute_kernel, entry.ranks, shards]


def planned(generator: Any, world: int = 4, local: int = 2, device: str = "cpu", **size: Any) -> Any:
    plan = P.construct_module_sharding_plan(
        bags(device="meta", **size), {"t": generator}, EmbeddingBagCollectionSharder(), local, world, device
    )
    return shown(plan["t"])


@case(f"{PLAN}.row_wise")
def row_wise_plans() -> Any:
    return [planned(P.row_wise()), planned(P.row_wise(compute_kernel="dense"), rows=13)]


@case(f"{PLAN}.row_wise", differs="a rank without rows has no shard; TorchRec gives it an empty one")
def fewer_rows_than_ranks() -> Any:
    return planned(P.row_wise(), rows=3)


@case(f"{PLAN}.row_wise", differs="TorchRec's are shards of one process in quantized inference; here ranks train them")
def rows_of_given_sizes() -> Any:
    return [
        planned(P.row_wise(([3, 1, 4, 2], "cpu"))),
        planned(P.row_wise(([3, 1, 4, 2], ["cpu"] * 4))),
    ]


@case(f"{PLAN}.construct_module_sharding_plan")
def placements_on_gpus() -> Any:
    return [planned(P.table_wise(rank=2), device="cuda"), planned(P.row_wise(), device="cuda")]


@case(f"{PLAN}.construct_module_sharding_plan")
def errors_of_plans() -> Any:
    module = bags(device="meta")
    sharder = EmbeddingBagCollectionSharder()
    call = P.construct_module_sharding_plan
    return {
        "unknown table": raised(lambda: call(module, {"x": P.row_wise()}, sharder, 2, 2, "cpu")) != "nothing",
        "no collection": raised(lambda: call(nn.Linear(1, 1), {}, None, 2, 2, "cpu")) != "nothing",
    }


@case(f"{PLAN}.get_module_to_default_sharders", f"{PLAN}.get_default_sharders")
def default_sharders() -> Any:
    found = P.get_module_to_default_sharders()
    kinds = (EmbeddingBagCollection, EmbeddingCollection, FusedEmbeddingBagCollection)
    return {
        "known": [kind in found for kind in kinds],
        "types": [type(found[kind]).__name__ for kind in kinds],
        "module types": [found[kind].module_type is kind for kind in kinds],
        "list": all(type(found[kind]) in {type(own) for own in P.get_default_sharders()} for kind in kinds),
    }


@case(f"{PLAN}.calculate_shard_sizes_and_offsets")
def sizes_and_offsets() -> Any:
    tensor = torch.empty(10, 12, device="meta")
    return {
        scheme: P.calculate_shard_sizes_and_offsets(tensor, 4, 2, scheme, col_wise_shard_dim=4) for scheme in SCHEMES
    }


@case(f"{PLAN}.calculate_shard_sizes_and_offsets", f"{PLAN}.MIN_CW_DIM")
def widths_of_column_shards() -> Any:
    def widths(dim: int, width: int | None) -> Any:
        found = P.calculate_shard_sizes_and_offsets(torch.empty(4, dim, device="meta"), 2, 2, "column_wise", width)
        return found[0]

    return {
        "constant": P.MIN_CW_DIM,
        "default": [widths(dim, None) for dim in (64, 128, 256, 512)],
        "rest": widths(10, 4),
        "too wide": widths(10, 100),
    }


@case(f"{PLAN}.calculate_shard_sizes_and_offsets")
def row_shards_by_memory_and_by_bucket() -> Any:
    tensor = torch.empty(12, 4, device="meta")
    return {
        "memory": P.calculate_shard_sizes_and_offsets(
            tensor, 3, 3, "row_wise", device_memory_sizes=[1, 1, 2]
        ),
        "buckets": P.calculate_shard_sizes_and_offsets(tensor, 4, 4, "row_wise", num_buckets=6),
        "unknown": raised(lambda: P.calculate_shard_sizes_and_offsets(tensor, 2, 2, "x")),
        "few rows": P.calculate_shard_sizes_and_offsets(torch.empty(3, 4, device="meta"), 4, 4, "row_wise"),
    }  # fmt: skip


@case(f"{PLAN}.placement", f"{PLAN}.placement_helper")
def placements_as_text() -> Any:
    return {
        "placement": [P.placement("cpu", 3, 2), P.placement("cuda", 3, 2), P.placement("mtia", 1, 2)],
        "helper": [P.placement_helper("cpu", 1, 1), P.placement_helper("cuda", 1, 3), P.placement_helper("cuda")],
        "unknown": raised(lambda: P.placement_helper("tpu", 0, 0)),
    }


BATCH = KeyedJaggedTensor(keys=["f_a", "f_b"], values=torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 0, 1]))


@case("torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder", ranks=2)
def a_sharder_by_hand(rank: int) -> Any:
    module, sharder = bags(names="ab", dim=4), EmbeddingBagCollectionSharder({"learning_rate": 0.1})
    plan = P.construct_module_sharding_plan(module, P.apply_to_all(module, P.row_wise()), sharder, 2, 2, "cpu")
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(torch.distributed.group.WORLD))
    fill(sharded, per_row=1.0)
    return {
        "output": sharded(BATCH).values(),
        "module type": sharder.module_type.__name__,
        "parameters": sorted(sharder.shardable_parameters(module)),
        "fused": sharder.fused_params["learning_rate"],
        "fused is a kernel": "fused" in sharder.compute_kernels("row_wise", "cpu"),
        "schemes": sorted(set(sharder.sharding_types("cpu")) & {"table_wise", "column_wise"}),
    }

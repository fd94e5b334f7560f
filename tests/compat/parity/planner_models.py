"""Models, options and plain values for the planner's cases."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, Perf, Shard, ShardingOption, Storage, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

META = torch.device("meta")


def bags(*sizes: tuple[int, int], features: int = 1, **options: Any) -> Any:
    """A bag collection with tables t0, t1, ... of (rows, columns)."""
    return EmbeddingBagCollection(
        device=META,
        tables=[
            EmbeddingBagConfig(
                name=f"t{number}",
                num_embeddings=rows,
                embedding_dim=cols,
                feature_names=[f"f{number}_{feature}" for feature in range(features)],
            )
            for number, (rows, cols) in enumerate(sizes)
        ],
        **options,
    )


def sequences(*sizes: tuple[int, int]) -> Any:
    """A sequence collection with tables s0, s1, ..."""
    return EmbeddingCollection(
        device=META,
        tables=[
            EmbeddingConfig(name=f"s{n}", num_embeddings=rows, embedding_dim=cols, feature_names=[f"g{n}"])
            for n, (rows, cols) in enumerate(sizes)
        ],
    )


class Model(nn.Module):
    """Bags and a dense layer."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        super().__init__()
        self.bags = bags(*(sizes or ((1001, 256), (3, 64))))
        self.over = nn.Linear(10, 7)
        self.norm = nn.BatchNorm1d(7)


def sharders(**options: Any) -> list[Any]:
    return [EmbeddingBagCollectionSharder(**options), EmbeddingCollectionSharder()]


def limits(scheme: str, kernel: str, names: Any = ("t0", "t1", "s0"), **more: Any) -> dict[str, Any]:
    return {name: ParameterConstraints(sharding_types=[scheme], compute_kernels=[kernel], **more) for name in names}


def listed(options: Any, costs: bool = True) -> list[Any]:
    """Options as plain values, sorted."""
    return sorted(
        [
            o.fqn,
            o.sharding_type,
            o.partition_by,
            o.compute_kernel,
            [[s.size, s.offset, *([store(s.storage), perf(s.perf)] if costs else [])] for s in o.shards],
        ]
        for o in options
    )


def store(storage: Any) -> list[int]:
    return [storage.hbm, storage.ddr, storage.ssd]


def perf(cost: Any) -> list[float]:
    return [
        float(x)
        for x in (
            cost.fwd_compute,
            cost.fwd_comms,
            cost.bwd_compute,
            cost.bwd_comms,
            cost.input_dist_comms,
            cost.prefetch_compute,
        )
    ]


def enumerated(module: Any, constraints: Any = None, topology: Any = None, batch: int = 64, **sharder: Any) -> Any:
    topology = topology or Topology(4, "cuda", local_world_size=2)
    return EmbeddingEnumerator(topology, batch, constraints).enumerate(module, sharders(**sharder))


def option(
    name: str,
    hbm: list[int],
    ms: list[float],
    scheme: str = "table_wise",
    where: str = "device",
    kernel: str = "fused",
    dependency: str | None = None,
    path: str = "m",
) -> Any:
    """An option whose shards have these bytes and times."""
    shards = [
        Shard([10, 8], [0, 8 * n], Storage(size, 0), Perf(time, 0.0, 0.0, 0.0))
        for n, (size, time) in enumerate(zip(hbm, ms, strict=True))
    ]
    return ShardingOption(
        name,
        torch.empty(10, 8 * len(shards), device=META),
        (path, nn.Module()),
        [1.0],
        8,
        scheme,
        where,
        kernel,
        shards,
        dependency=dependency,
        is_pooled=True,
    )


def kind(action: Any) -> Any:
    """The type of the planner's error that a call raises; "nothing" if it returns."""
    try:
        action()
    except Exception as error:
        found = getattr(error, "error_type", None)
        return type(error).__name__ if found is None else found.value
    return "nothing"


def ranks(options: Any) -> dict[str, Any]:
    return {o.name: [s.rank for s in o.shards] for o in options}


def free(topology: Any) -> list[Any]:
    return [[*store(d.storage), round(d.perf.total, 6)] for d in topology.devices]

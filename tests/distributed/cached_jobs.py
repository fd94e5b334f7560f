"""Tables on the kernel "fused_uvm_caching" beside the same tables on "fused"."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ParameterSharding,
    ShardingPlan,
    Topology,
)
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.embedding.dynamic.config import EmulatedCost
from recshard_lab.sharding import CacheParams
from recshard_lab.sharding.schemes import scheme_named
from recshard_lab.train.pipelines import PrefetchTrainPipelineSparseDist

CACHED, FUSED = "fused_uvm_caching", "fused"
SCHEMES = ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard")
LARGE = 5  # the step whose batch has more distinct ids than the caches


def world() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def tables() -> list[EmbeddingBagConfig]:
    """Of 3,000 and 1,500 rows: a cache of a tenth has 3 and 2 buckets, or fewer if the rows are split."""
    return [
        EmbeddingBagConfig(3000, 16, "a", feature_names=["fa", "fb"]),
        EmbeddingBagConfig(1500, 8, "b", feature_names=["fc"]),
    ]


def plan_of(scheme: str, kernel: str, cache: CacheParams | None = None) -> ShardingPlan:
    """Both tables under a scheme. 4 ranks are 2 nodes."""
    ranks = world()[1]
    topology = Topology(ranks, local_world_size=2 if ranks == 4 else ranks)
    made = {table.name: scheme_named(scheme).default(table, topology).shards for table in tables()}
    entries = {name: ParameterSharding(scheme, kernel, None, None, cache, shards=own) for name, own in made.items()}
    return ShardingPlan({"": entries})  # type: ignore[dict-item]


def cached_plan(scheme: str, algorithm: str = "lru", cost: EmulatedCost | None = None) -> ShardingPlan:
    """The same with a tenth of the rows in the cache."""
    return plan_of(scheme, CACHED, CacheParams(algorithm, 0.1, cost))


def model_of(plan: ShardingPlan, optimizer: str, backend: str | None = None) -> DistributedModelParallel:
    """A model with the same weights under every plan."""
    module = EmbeddingBagCollection(tables())
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    sharder = EmbeddingBagCollectionSharder({"optimizer": optimizer, "learning_rate": 0.05}, backend=backend)
    return DistributedModelParallel(module, plan=plan, sharders=[sharder])


def batches(count: int) -> list[KeyedJaggedTensor]:
    """Of this rank, with skewed ids. Their sizes differ between ranks."""
    rank, _ = world()
    rng = torch.Generator().manual_seed(rank)
    found = []
    for step in range(count):
        samples = 300 if step == LARGE else 40 + rank
        lengths = torch.randint(0, 5, (3, samples), generator=rng)
        draws = [torch.rand(int(own.sum()), generator=rng) ** 3 for own in lengths]
        ids = [(draw * rows).long() for draw, rows in zip(draws, (3000, 3000, 1500), strict=True)]
        found.append(KeyedJaggedTensor(["fa", "fb", "fc"], torch.cat(ids), lengths=lengths.flatten()))
    return found


def state_of(dmp: DistributedModelParallel) -> dict[str, Tensor]:
    """This rank's weights and optimizer states."""
    found = {}
    for name, shards in dmp.table_shards().items():
        for part in shards.parts():
            found |= {f"{name}.{part.name}.{at}": matrix.clone() for at, matrix in shards.matrices(part).items()}
    return found


def step(dmp: DistributedModelParallel, batch: KeyedJaggedTensor) -> Tensor:
    """Trains on a batch. Returns its output."""
    out = dmp(batch.to(dmp.device)).values()
    out.pow(2).sum().backward()
    return out.detach().clone()


def trained(plan: ShardingPlan, optimizer: str, move: ShardingPlan | None = None) -> tuple[dict[str, Tensor], Any]:
    """Outputs, evaluations, states in mid-training and the last states; then what the caches counted."""
    dmp, found = model_of(plan, optimizer), {}
    for number, batch in enumerate(batches(9)):
        found[f"output {number}"] = step(dmp, batch)
        if number % 4 == 3:
            with torch.no_grad():
                found[f"evaluation {number}"] = dmp.eval()(batches(9)[LARGE].to(dmp.device)).values().clone()
            dmp.train()
            found |= {f"{name} after {number}": tensor for name, tensor in dmp.full_state_dict().items()}
        if number == 6 and move is not None:
            dmp.reshard(move)
    return found | state_of(dmp), counters(dmp)


def counters(dmp: DistributedModelParallel) -> list[dict[str, float]]:
    """What each shard's cache on this rank counted."""
    groups = dmp.collections[""].executor.lookup.groups
    return [counted for group in groups for counted in group.kernel.counters()]


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what is not equal, bit for bit."""
    assert list(one) == list(other)
    return [name for name in one if not torch.equal(one[name].cpu(), other[name].cpu())]


def compared(scheme: str, optimizer: str, algorithm: str = "lru") -> tuple[list[str], list[dict[str, float]]]:
    """What differs with a cache, and what the caches counted."""
    truth, _ = trained(plan_of(scheme, FUSED), optimizer)
    found, counted = trained(cached_plan(scheme, algorithm), optimizer)
    return apart(found, truth), counted


def moved(before: str, after: str) -> tuple[list[str], list[dict[str, float]]]:
    """The same, with a move to another scheme in between."""
    truth, _ = trained(plan_of(before, FUSED), "adam", plan_of(after, FUSED))
    found, counted = trained(cached_plan(before), "adam", cached_plan(after))
    return apart(found, truth), counted


def memory() -> tuple[dict[str, int], int]:
    """By how many bytes a model with caches exceeds one without, and the bytes of its caches' weights."""
    dmp, fused = model_of(cached_plan("row_wise"), "adam"), model_of(plan_of("row_wise", FUSED), "adam")
    held, plain = dmp.memory_bytes(), fused.memory_bytes()
    slots = [int(own["slots"]) for own in counters(dmp)]
    weights = sum(many * 4 * table.embedding_dim for many, table in zip(slots, tables(), strict=True))
    return {name: held[name] - plain[name] for name in ("weights", "optimizer_state")}, weights


class Scored(nn.Module):
    """A collection with a loss."""

    def __init__(self, dmp: DistributedModelParallel) -> None:
        super().__init__()
        self.dmp = dmp

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        out = self.dmp(batch).values()
        return out.pow(2).sum(), out.detach().clone()


def piped(cost: EmulatedCost | None = None) -> tuple[list[str], list[str], list[dict[str, float]], int]:
    """What differs from the plain loop without a cache; the same with states read and written between steps; counters;
    and how many batches were prefetched."""
    truth, dmp, other = (
        model_of(plan, "adam") for plan in (plan_of("row_wise", FUSED), *[cached_plan("row_wise", cost=cost)] * 2)
    )
    found: dict[str, Tensor] = {}
    expected = {f"{number}": step(truth, batch) for number, batch in enumerate(batches(9))}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with PrefetchTrainPipelineSparseDist(Scored(dmp), optimizer, dmp.device, threads=True) as pipeline:
        source = iter(batches(9))
        found = {f"{number}": pipeline.progress(source) for number in range(9)}
        prefetched = sum(event.stage == "prefetch" for event in pipeline.events)
    differ = apart(found | state_of(dmp), expected | state_of(truth))
    with PrefetchTrainPipelineSparseDist(Scored(other), optimizer, dmp.device, threads=True) as pipeline:
        source = iter(batches(9))
        for _ in range(9):
            pipeline.progress(source)
            saved = {name: tensor.clone() for name, tensor in state_of(other).items()}
            for name, shards in other.table_shards().items():
                for part in shards.parts():
                    for at, matrix in shards.matrices(part).items():
                        matrix.zero_()
                        matrix.copy_(saved[f"{name}.{part.name}.{at}"])
    return differ, apart(state_of(other), state_of(truth)), counters(dmp), prefetched

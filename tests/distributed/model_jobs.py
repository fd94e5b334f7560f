"""Models that train sharded, beside their plain twins on one process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
    ShardingPlan,
)
from recshard_lab.data import Batch
from recshard_lab.distributed import EmbeddingBagCollectionSharder, RankPeers
from recshard_lab.models import DLRM, DLRM_DCN, DeepFMNN, StreamingFrequency, TwoTower, TwoTowerTrainTask

TABLES = [
    {"name": "t1", "num_embeddings": 23, "embedding_dim": 8, "feature_names": ["a", "b"]},
    {"name": "t2", "num_embeddings": 11, "embedding_dim": 8, "feature_names": ["c"], "pooling": PoolingType.MEAN},
    {"name": "t3", "num_embeddings": 40, "embedding_dim": 8, "feature_names": ["d"]},
]
FEATURES = "abcd"
DENSE, STEPS, LR = 3, 4, 0.1

MODELS: dict[str, Callable[[EmbeddingBagCollection, Any], nn.Module]] = {
    "dlrm": lambda ebc, device: DLRM(ebc, DENSE, [6, 8], [10, 1], dense_device=device),
    "deepfm": lambda ebc, device: DeepFMNN(ebc, DENSE, [10, 6], dense_device=device),
    "dlrm_dcn": lambda ebc, device: DLRM_DCN(ebc, DENSE, [6, 8], [10, 1], 2, 3, dense_device=device),
}


def _draw(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.3)


def model(name: str, device: str | None = None) -> nn.Module:
    torch.manual_seed(3)
    tables = [EmbeddingBagConfig(**table, init_fn=_draw) for table in TABLES]
    return MODELS[name](EmbeddingBagCollection(tables, device=device), device)


def batch(step: int, rank: int, samples: int = 6) -> Batch:
    draw = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(FEATURES) * samples,), generator=draw)
    rows = {"a": 23, "b": 23, "c": 11, "d": 40}
    ids = [
        torch.randint(rows[feature], (int(own.sum()),), generator=draw)
        for feature, own in zip(FEATURES, lengths.split(samples), strict=True)
    ]
    return Batch(
        torch.randn(samples, DENSE, generator=draw),
        KeyedJaggedTensor(list(FEATURES), torch.cat(ids), lengths=lengths),
        torch.randint(2, (samples,), generator=draw).float(),
    )


def joined(batches: Sequence[Batch], features: str = FEATURES) -> Batch:
    """Every rank's samples in one batch."""
    keyed = [batch.sparse_features for batch in batches]
    values = torch.cat([each[feature].values() for feature in features for each in keyed])
    lengths = torch.cat([each[feature].lengths() for feature in features for each in keyed])
    return Batch(
        torch.cat([batch.dense_features for batch in batches]),
        KeyedJaggedTensor(list(features), values, lengths=lengths),
        torch.cat([batch.labels for batch in batches]),
    )


def peak() -> int:
    """The most memory that this process had since `forget_peak`, in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    gc.collect()  # models of jobs before
    ctypes.CDLL(None).malloc_trim(0)  # and what the allocator kept of them
    Path("/proc/self/clear_refs").write_text("5")


def built_on_meta(name: str, rows: int, plan: str, small_plan: str) -> tuple[int, int, bool]:
    """On a rank: (bytes by which its peak memory grew, bytes of its rectangles, whether nothing is left on meta)."""
    _build(name, 8, small_plan)  # modules are imported, kernels loaded
    forget_peak()
    before = peak()
    dmp = _build(name, rows, plan)
    held = sum(p.numel() * p.element_size() for c in dmp.collections.values() for p in c.parameters())
    return peak() - before, held, not any(p.is_meta for p in dmp.parameters())


def _build(name: str, rows: int, plan: str) -> DistributedModelParallel:
    tables = [EmbeddingBagConfig(rows, 8, f"t{n}", feature_names=[feature]) for n, feature in enumerate(FEATURES)]
    ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
    return DistributedModelParallel(MODELS[name](ebc, "meta"), plan=ShardingPlan.from_json(plan))


def retrieval(rank: int, world_size: int, samples: int = 7) -> list[Batch]:
    """Batches of users and movies, one id each; the second rank has fewer samples, and none in the last step."""
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + rank)
        size = samples if rank == 0 else (samples - 3) * (step < STEPS - 1)
        ids = [torch.randint(rows, (size,), generator=draw) for rows in (23, 11, 40)]
        kjt = KeyedJaggedTensor(["a", "c", "d"], torch.cat(ids), lengths=torch.ones(3 * size, dtype=torch.int64))
        found.append(Batch(torch.zeros(size, 0), kjt, (torch.rand(size, generator=draw) < 0.7).float()))
    return found


def two_towers(peers: Any) -> TwoTowerTrainTask:
    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(**{**table, "feature_names": table["feature_names"][:1]}, init_fn=_draw) for table in TABLES
    ]
    model = TwoTower(EmbeddingBagCollection(tables), [6, 4], normalize=True)
    return TwoTowerTrainTask(
        model,
        in_batch_negatives=True,
        temperature=0.2,
        candidate_id="c",
        frequency=StreamingFrequency(11),
        peers=peers,
    )


def train_towers(plan: str | None) -> tuple[list[float], dict[str, Tensor]]:
    """Sharded on a rank where there is a plan; else one process with the batches of two ranks as one."""
    rank = torch.distributed.get_rank() if plan else 0
    task: Any = two_towers(RankPeers() if plan else None)
    parameters = task.parameters()
    if plan:
        sharders = [EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": LR})]
        task = DistributedModelParallel(task, plan=ShardingPlan.from_json(plan), sharders=sharders)
        parameters = task.dense_parameters()
    optimizer = torch.optim.SGD(parameters, lr=LR)
    both = [retrieval(0, 2), retrieval(1, 2)]
    batches = both[rank] if plan else [joined(list(pair), "acd") for pair in zip(*both, strict=True)]
    losses = []
    for own in batches:
        loss = task(own)[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if plan:
            torch.distributed.all_reduce(mean)
        losses.append(float(mean) / (2 if plan else 1))
    return losses, task.full_state_dict() if plan else task.state_dict()

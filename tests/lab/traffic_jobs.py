"""What ranks run in the tests of traffic: steps whose ids spread evenly over any stripes, counted by the label of each
collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.planner import Workload

SAMPLES = 16
RATE = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.01}


def even_batch(tables: Sequence[EmbeddingBagConfig], stripes: int) -> Any:
    """Every bag has one id in each of so many equal stripes of rows; together they are all rows."""
    import torch

    from recshard_lab.sparse import KeyedJaggedTensor

    ids = []
    for table in tables:
        rows = table.num_embeddings // stripes
        ids += [stripe * rows + sample % rows for sample in range(SAMPLES) for stripe in range(stripes)]
    lengths = torch.full((len(tables) * SAMPLES,), stripes)
    return KeyedJaggedTensor([name for t in tables for name in t.feature_names], torch.tensor(ids), lengths=lengths)


def even_load(tables: Sequence[EmbeddingBagConfig], stripes: int, ranks: int, **more: Any) -> Workload:
    """The workload of `even_batch` on so many ranks."""
    distinct = {t.name: t.num_embeddings / (ranks * stripes * SAMPLES) for t in tables}
    return Workload(SAMPLES, float(stripes), unique_fraction=distinct, optimizer=RATE["optimizer"], **more)


def counted_steps(plan_json: str, tables: Sequence[EmbeddingBagConfig], steps: int = 2) -> dict[str, list[float]]:
    """Bytes to each rank in a step, by label."""
    import torch.distributed as dist

    from recshard_lab import DistributedModelParallel, EmbeddingBagCollection
    from recshard_lab.comm import trace
    from recshard_lab.distributed import EmbeddingBagCollectionSharder
    from recshard_lab.lab.compare.measure import sent_by_label
    from recshard_lab.sharding import ShardingPlan

    model = DistributedModelParallel(
        EmbeddingBagCollection(list(tables)),
        plan=ShardingPlan.from_json(plan_json),
        sharders=[EmbeddingBagCollectionSharder(fused_params=RATE)],
    )
    batch = even_batch(tables, dist.get_world_size())
    with trace() as sent:
        for _ in range(steps):
            model(batch).values().sum().backward()
    return sent_by_label(sent, dist.get_world_size(), steps)


def matrices(found: Sequence[dict[str, list[float]]]) -> dict[str, np.ndarray]:
    """``[W, W]`` by label, without what stays on its rank, and without labels under which nothing else was sent."""
    labels = dict.fromkeys(label for one in found for label in one)
    made = {label: np.array([one.get(label, [0.0] * len(found)) for one in found]) for label in labels}
    for sent in made.values():
        np.fill_diagonal(sent, 0.0)
    return {label: sent for label, sent in made.items() if sent.any()}

"""A `TrainCase` in this library."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import cycle
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.apparatus.step_ours import batch_of
from benchmarks.apparatus.train_case import Clicks, TrainCase, dealt, dense_part
from recshard_lab.comm.wire import LATENCY_VARIABLE
from recshard_lab.data import Batch
from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder
from recshard_lab.embedding import EmbeddingBagCollection, EmbOptimType
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ShardingPlan
from recshard_lab.train import pipelines
from recshard_lab.train.launch_costs import compile_dense
from recshard_lab.train.stages import hidden_share

CPU = torch.device("cpu")
REST = 0.01  # learning rate of the dense part


class Ours:
    """The model of one rank, for the plain loop and all pipelines in turn."""

    def __init__(self, case: TrainCase, rank: int) -> None:
        self.case, step = case, case.step
        if case.link_ms:  # every rank is its own node, and crossing takes time
            os.environ |= {LATENCY_VARIABLE: repr(case.link_ms), "LOCAL_WORLD_SIZE": "1"}
        configs, plan = step.configs(), step.plan().tables()
        groups = dealt(case)
        made = [EmbeddingBagCollection([configs[n] for n in group], device=torch.device("meta")) for group in groups]
        entries = {
            f"ebc{number}": EmbeddingModuleShardingPlan({configs[n].name: plan[configs[n].name] for n in group})
            for number, group in enumerate(groups)
        }
        fused = {"optimizer": EmbOptimType(step.optimizer), "learning_rate": 0.01}
        sharder = EmbeddingBagCollectionSharder(fused, batch_tables=case.batch_tables)
        self.model = DistributedModelParallel(Clicks([*made], case), plan=ShardingPlan(entries), sharders=[sharder])
        if case.compiled:
            compile_dense(self.model)
        self.optimizer = torch.optim.SGD(self.model.dense_parameters(), lr=REST)
        self.batches = [self._batch(rank, number) for number in range(4)]
        self.turn = cycle(self.batches)
        self.pipelines: dict[str, tuple[Any, Iterator[Any]]] = {}

    def _batch(self, rank: int, number: int) -> Batch:
        dense, labels = dense_part(self.case, rank, number)
        return Batch(dense, batch_of(self.case.step, rank=rank, number=number), labels)

    def plain(self, count: int) -> None:
        """Steps of a plain loop."""
        for _ in range(count):
            batch = next(self.turn).to(CPU)
            self.optimizer.zero_grad()
            self.model(batch)[0].backward()
            self.optimizer.step()

    def piped(self, kind: str, count: int) -> None:
        """Steps of a pipeline that stays full between calls."""
        if kind not in self.pipelines:
            switches = {"threads": self.case.threads, "fuse_exchanges": self.case.fuse_exchanges}
            options: dict[str, Any] = {"start_batch": 1} if kind == "TrainPipelineSemiSync" else {}
            made = getattr(pipelines, kind)(self.model, self.optimizer, CPU, **options, **switches)
            self.pipelines[kind] = made, cycle(self.batches)
        pipeline, source = self.pipelines[kind]
        for _ in range(count):
            pipeline.progress(source)

    def stages(self, count: int) -> dict[str, float]:
        """Median milliseconds of copying and of sending ids on their own, ranks starting together."""
        copy, sent = [], []
        for _ in range(count):
            dist.barrier()
            begun = time.perf_counter()
            batch = next(self.turn).to(CPU)
            copied = time.perf_counter()
            for collection in self.model.collections.values():
                collection.send(batch.sparse_features).wait()
            copy.append(copied - begun)
            sent.append(time.perf_counter() - copied)
        return {"copy": 1e3 * median(copy), "dist": 1e3 * median(sent)}

    def hidden(self, kind: str) -> float:
        """The share of input_dist that ran behind computing."""
        return hidden_share(self.pipelines[kind][0].events)

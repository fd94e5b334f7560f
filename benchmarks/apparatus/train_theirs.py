"""A `TrainCase` in TorchRec; imported only by ranks in TorchRec's environment."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.apparatus.step_case import rectangles
from benchmarks.apparatus.step_theirs import _entries
from benchmarks.apparatus.train_case import Clicks, TrainCase, dealt, dense_part

CPU = torch.device("cpu")
REST = 0.01


class Theirs:
    """The model of one rank. TorchRec's pipelines rewrite their model, so each pipeline has a separate one."""

    def __init__(self, case: TrainCase, rank: int) -> None:
        self.case = case
        self.batches = [self._batch(rank, number) for number in range(4)]
        self.turn = cycle(self.batches)
        self.model, self.optimizer = self._made()
        self.pipelines: dict[str, tuple[Any, Iterator[Any]]] = {}

    def _made(self) -> tuple[Any, Any]:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection
        from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        step, names, groups = self.case.step, self.case.step.table_names(), dealt(self.case)
        made: list[Any] = [
            EmbeddingBagCollection(
                [
                    EmbeddingBagConfig(
                        name=names[n], num_embeddings=step.rows, embedding_dim=step.dim, feature_names=[f"f{n}"]
                    )
                    for n in group
                ],
                device=torch.device("meta"),
            )
            for group in groups
        ]
        entries = _entries(rectangles(step.plan()))
        plan = {
            f"ebc{number}": EmbeddingModuleShardingPlan({names[n]: entries[names[n]] for n in group})
            for number, group in enumerate(groups)
        }
        fused = {"optimizer": EmbOptimType(step.optimizer), "learning_rate": 0.01}
        model = DistributedModelParallel(
            Clicks(made, self.case),
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
            plan=ShardingPlan(plan),
            sharders=[EmbeddingBagCollectionSharder(fused_params=fused)],
        )
        rest = dict(in_backward_optimizer_filter(model.named_parameters()))
        dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=REST))
        return model, CombinedOptimizer([model.fused_optimizer, dense])

    def _batch(self, rank: int, number: int) -> Any:
        from torchrec.datasets.utils import Batch
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        step = self.case.step
        ids = torch.from_numpy(step.bag_ids(rank, number))
        lengths = torch.full((step.tables * step.batch,), step.pooling, dtype=torch.long)
        dense, labels = dense_part(self.case, rank, number)
        return Batch(dense, KeyedJaggedTensor([f"f{n}" for n in range(step.tables)], ids, lengths=lengths), labels)

    def plain(self, count: int) -> None:
        """Steps of a plain loop."""
        for _ in range(count):
            batch = next(self.turn).to(CPU)
            self.optimizer.zero_grad()
            self.model(batch)[0].backward()
            self.optimizer.step()

    def piped(self, kind: str, count: int) -> None:
        """Steps of TorchRec's pipeline of this name, which stays full between calls."""
        if kind not in self.pipelines:
            from torchrec.distributed.train_pipeline import train_pipelines

            model, optimizer = self._made()
            made = getattr(train_pipelines, kind)(model, optimizer, CPU, execute_all_batches=True)
            self.pipelines[kind] = made, cycle(self.batches)
        pipeline, source = self.pipelines[kind]
        for _ in range(count):
            pipeline.progress(source)

    def stages(self, count: int) -> dict[str, float]:
        """Not measured here."""
        return {}

    def hidden(self, kind: str) -> float:
        """Not measured here."""
        return float("nan")

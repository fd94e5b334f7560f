"""Training pipelines: each gives the outputs and weights of a plain loop; stages of the user; loading threads."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable, Pipelineable

from tests.compat.parity.case import case, on_ranks, raised

CPU = torch.device("cpu")
PIPELINES = "torchrec.distributed.train_pipeline"


class Batch(Pipelineable):
    """A user's batch."""

    def __init__(self, features: KeyedJaggedTensor, labels: torch.Tensor) -> None:
        self.features, self.labels = features, labels

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(self.features.to(device, non_blocking), self.labels.to(device))

    def record_stream(self, stream: Any) -> None:
        """Nothing."""

    def pin_memory(self) -> "Batch":
        return self


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=8, embedding_dim=8, feature_names=[f"f_{name}"])
            for name in "ab"
        ]
        self.bags = EmbeddingBagCollection(tables=tables)
        self.over = nn.Linear(16, 1)
        with torch.no_grad():
            self.over.weight.copy_(torch.arange(16).reshape(1, 16) / 16)
            self.over.bias.fill_(0.5)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.over(self.bags(batch.features).values()).squeeze(1)
        return nn.functional.mse_loss(found, batch.labels), found.detach()


def fill(module: nn.Module) -> None:
    """Row r of each table has r / 10 in each column."""
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if "embedding_bags" in name and hasattr(value, "local_shards"):
                for own in value.local_shards():
                    row, rows = own.metadata.shard_offsets[0], own.metadata.shard_sizes[0]
                    own.tensor.copy_((torch.arange(row, row + rows) / 10).unsqueeze(1).expand_as(own.tensor))
            elif "embedding_bags" in name:
                value.copy_((torch.arange(value.shape[0]) / 10).unsqueeze(1).expand_as(value))


def tables(module: nn.Module, rank: int) -> Any:
    """The sum of each row; None on other ranks than 0."""
    found = {}
    for name, value in sorted(module.state_dict().items()):
        if hasattr(value, "local_shards"):
            full = torch.zeros(value.size()) if rank == 0 else None
            value.gather(0, full)
            value = full
        found[name] = None if value is None or rank else value.sum(-1)
    return found


def parts(rank: int) -> tuple[Any, Any]:
    """A sharded model and the optimizer of its dense part."""
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.05})
    plan = construct_module_sharding_plan(
        model.bags, {"a": row_wise(), "b": table_wise(rank=1)}, EmbeddingBagCollectionSharder(), 2, 2, "cpu"
    )
    dmp = DistributedModelParallel(model, device=CPU, plan=ShardingPlan({"bags": plan}))
    fill(dmp)
    dense = {name: own for name, own in dmp.named_parameters() if name.startswith("over")}
    return dmp, KeyedOptimizerWrapper(dense, lambda own: torch.optim.SGD(own, lr=0.05))


def batches(rank: int, count: int = 5) -> list[Batch]:
    """Batches of two samples; each rank has others."""
    return [
        Batch(
            KeyedJaggedTensor(
                keys=["f_a", "f_b"],
                values=torch.tensor([n, 3 + rank, n + 1, 7 - n, rank]) % 8,
                lengths=torch.tensor([1, 2, 2, 0]),
            ),
            torch.tensor([float(n), float(rank)]),
        )
        for n in range(count)
    ]


def trained(make: Any, count: int = 5, more: Any = None) -> Any:
    """Outputs and weights of both ranks after a pipeline has consumed all batches."""

    def job(rank: int) -> Any:
        dmp, optimizer = parts(rank)
        pipeline, iterator, outputs = make(dmp, optimizer), iter(batches(rank, count)), []
        while True:
            try:
                outputs.append(pipeline.progress(iterator))
            except StopIteration:
                break
        return {"outputs": outputs, "state": tables(dmp, rank), "more": more(pipeline, dmp) if more else None}

    return on_ranks(2, job)


@case(f"{PIPELINES}.TrainPipelineBase")
def the_plain_pipeline() -> Any:
    return trained(lambda dmp, optimizer: TrainPipelineBase(dmp, optimizer, CPU))


@case(f"{PIPELINES}.TrainPipelineSparseDist")
def ids_travel_ahead() -> Any:
    return trained(lambda dmp, optimizer: TrainPipelineSparseDist(dmp, optimizer, CPU))


@case(f"{PIPELINES}.TrainPipelineSparseDist")
def keywords_of_the_pipeline() -> Any:
    return trained(
        lambda dmp, optimizer: TrainPipelineSparseDist(
            model=dmp, optimizer=optimizer, device=CPU, execute_all_batches=True, apply_jit=False,
            pipeline_postproc=True, dmp_collection_sync_interval_batches=1,
        )
    )  # fmt: skip


@case(f"{PIPELINES}.TrainPipelineSparseDist")
def batches_in_flight_are_dropped() -> Any:
    return trained(lambda dmp, optimizer: TrainPipelineSparseDist(dmp, optimizer, CPU, execute_all_batches=False))


@case(f"{PIPELINES}.TrainPipelineSparseDist")
def a_forward_of_the_user() -> Any:
    def make(dmp: Any, optimizer: Any) -> Any:
        def forward(batch: Batch) -> Any:
            loss, found = dmp(batch)
            return 2 * loss, found + 1

        return TrainPipelineSparseDist(dmp, optimizer, CPU, custom_model_fwd=forward)

    return trained(make)


@case(f"{PIPELINES}.TrainPipelineSparseDist")
def evaluation_trains_nothing() -> Any:
    def make(dmp: Any, optimizer: Any) -> Any:
        dmp.eval()
        return TrainPipelineSparseDist(dmp, optimizer, CPU)

    return trained(make, 3)


@case(f"{PIPELINES}.TrainPipelineSparseDist")
def a_pipeline_is_detached() -> Any:
    def more(pipeline: Any, dmp: Any) -> Any:
        own = pipeline.detach()
        return {"same": own is dmp, "output": own(batches(0, 1)[0])[1]}

    return trained(lambda dmp, optimizer: TrainPipelineSparseDist(dmp, optimizer, CPU), 3, more)


@case(f"{PIPELINES}.TrainPipelineSparseDist", ranks=2)
def a_second_iterator(rank: int) -> Any:
    dmp, optimizer = parts(rank)
    pipeline, outputs = TrainPipelineSparseDist(dmp, optimizer, CPU), []
    for _ in range(2):
        iterator = iter(batches(rank, 3))
        while True:
            try:
                outputs.append(pipeline.progress(iterator))
            except StopIteration:
                break
    return {"outputs": outputs, "state": tables(dmp, rank)}


@case(f"{PIPELINES}.TrainPipelineSparseDist", ranks=2)
def the_end_of_the_data(rank: int) -> Any:
    dmp, optimizer = parts(rank)
    pipeline = TrainPipelineSparseDist(dmp, optimizer, CPU)
    return [raised(lambda: pipeline.progress(iter([]))), raised(lambda: pipeline.progress(iter([])))]


@case(f"{PIPELINES}.PrefetchTrainPipelineSparseDist", "torchrec.distributed.PrefetchTrainPipelineSparseDist",
      differs="TorchRec's needs CUDA streams; here it gives the plain loop's results", ranks=2)  # fmt: skip
def rows_are_prefetched(rank: int) -> Any:
    dmp, optimizer = parts(rank)
    return raised(lambda: PrefetchTrainPipelineSparseDist(dmp, optimizer, CPU).progress(iter(batches(rank))))


@case(f"{PIPELINES}.EvalPipelineSparseDist")
def scoring() -> Any:
    def make(dmp: Any, optimizer: Any) -> Any:
        dmp.eval()
        return EvalPipelineSparseDist(dmp, optimizer, CPU)

    return trained(make, 3)


@case(f"{PIPELINES}.TrainPipeline")
def a_pipeline_of_the_user() -> Any:
    class Mine(TrainPipelineBase[Batch, torch.Tensor]):
        def progress(self, dataloader_iter: Any) -> Any:
            return super().progress(dataloader_iter) * 2

    return trained(lambda dmp, optimizer: Mine(dmp, optimizer, CPU), 2)


# ---- stages ----


class Item(Multistreamable):
    """A batch of one number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def record_stream(self, stream: Any) -> None:
        """Nothing."""


def items(*numbers: int) -> Any:
    return iter([Item(number) for number in numbers])


# ---- loading ----

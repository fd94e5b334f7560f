"""Training pipelines: each gives the outputs and weights of a plain loop; stages of the user; loading threads."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable, Pipelineable

from tests.compat.parity.case import case, on_ranks, raised
from tests.compat.parity.sharded_tables import CPU, configs, fill, plan_of, row_sums

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
        self.bags = EmbeddingBagCollection(tables=configs("ab"))
        self.over = nn.Linear(16, 1)
        with torch.no_grad():
            self.over.weight.copy_(torch.arange(16).reshape(1, 16) / 16)
            self.over.bias.fill_(0.5)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.over(self.bags(batch.features).values()).squeeze(1)
        return nn.functional.mse_loss(found, batch.labels), found.detach()


def parts(rank: int) -> tuple[Any, Any]:
    """A sharded model and the optimizer of its dense part."""
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.05})
    plan = plan_of(model.bags, {"a": row_wise(), "b": table_wise(rank=1)})
    dmp = DistributedModelParallel(model, device=CPU, plan=plan)
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


def outputs_of(pipeline: Any, batches: Any) -> list[Any]:
    """Outputs until the iterator of batches is exhausted."""
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            return outputs


def trained(make: Any, count: int = 5, more: Any = None) -> Any:
    """Outputs and weights of both ranks after a pipeline has consumed all batches."""

    def job(rank: int) -> Any:
        dmp, optimizer = parts(rank)
        pipeline = make(dmp, optimizer)
        outputs = outputs_of(pipeline, iter(batches(rank, count)))
        return {"outputs": outputs, "state": row_sums(dmp, rank), "more": more(pipeline, dmp) if more else None}

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
    pipeline = TrainPipelineSparseDist(dmp, optimizer, CPU)
    outputs = [output for _ in range(2) for output in outputs_of(pipeline, iter(batches(rank, 3)))]
    return {"outputs": outputs, "state": row_sums(dmp, rank)}


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

"""`SparseDataDistUtil` in a pipeline of stages gives the plain loop's results; `dmp.copy` trains on its own."""

from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)
from recshard_lab.compat.distributed.stages import PipelineStage, SparseDataDistUtil, StagedTrainPipeline
from recshard_lab.compat.distributed.utils import copy_to_device


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [EmbeddingBagConfig(name=n, num_embeddings=8, embedding_dim=4, feature_names=[n]) for n in "ab"]
        self.bags, self.over = EmbeddingBagCollection(tables), nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.over(self.bags(features).values())


def batches() -> list[KeyedJaggedTensor]:
    return [
        KeyedJaggedTensor(["a", "b"], torch.tensor([n, 1, 2 + n, 7 - n]), lengths=torch.tensor([1, 1, 2, 0]))
        for n in range(5)
    ]


def step(dmp: DistributedModelParallel, batch: KeyedJaggedTensor, sdd: SparseDataDistUtil | None) -> torch.Tensor:
    output: torch.Tensor = dmp(batch)
    if sdd is not None:
        sdd.wait_sparse_data_dist()
    output.square().sum().backward()
    return output.detach()


def test_ids_that_a_stage_sends_give_the_plain_loops_results() -> None:
    plain, staged = DistributedModelParallel(Model()), DistributedModelParallel(Model())
    expected = [step(plain, batch, None) for batch in batches()]
    sent: list[Any] = []
    sdd = SparseDataDistUtil(staged, None)
    collection = staged.module.bags
    original = collection.send
    collection.send = lambda features: sent.append(features) or original(features)  # type: ignore[method-assign]
    pipeline = StagedTrainPipeline([PipelineStage("copy", lambda own: own, None), sdd.start_sparse_data_dist_stage()])
    iterator, outputs = iter(batches()), []
    while (batch := pipeline.progress(iterator)) is not None:
        outputs.append(step(staged, batch, sdd))
    assert len(outputs) == 5
    assert all(torch.equal(own, other) for own, other in zip(outputs, expected, strict=True))
    assert len(sent) == 5, "each batch is sent once"
    model = sdd.detach()
    assert torch.equal(model(batches()[0]), plain(batches()[0])), "a forward without a stage sends for itself"


def test_a_stage_refuses_what_it_does_not_support() -> None:
    dmp = DistributedModelParallel(Model())
    with pytest.raises(ValueError, match="apply_jit=True is not supported: torch"):
        SparseDataDistUtil(dmp, None, apply_jit=True)
    with pytest.raises(ValueError, match="embedding_lookup_stream is not supported"):
        SparseDataDistUtil(dmp, None, embedding_lookup_stream=object())
    with pytest.raises(ValueError, match="pipeline_stages is empty"):
        StagedTrainPipeline([])


def test_a_copy_of_a_model_trains_alone() -> None:
    dmp = DistributedModelParallel(Model())
    twin = dmp.copy("cpu")
    first = step(twin, batches()[0], None)
    assert torch.equal(dmp(batches()[0]), first), "the original is not stepped by the copy"
    assert not torch.equal(twin(batches()[0]), first)
    twin.fused_optimizer.param_groups[0]["lr"] = 0.0
    assert dmp.fused_optimizer.param_groups[0]["lr"] != 0.0


def test_a_sharded_module_is_copied_with_the_others() -> None:
    dmp = DistributedModelParallel(Model())
    copied = copy_to_device(dmp.module, torch.device("cpu"), torch.device("cpu"))
    assert torch.equal(copied(batches()[0]), dmp(batches()[0]))
    with torch.no_grad():
        copied.over.weight.zero_()
    assert dmp.module.over.weight.any()


def test_a_stage_refuses_arguments_of_another_type() -> None:
    collection = DistributedModelParallel(Model()).module.bags
    with pytest.raises(ValueError, match=r"ctx is None, expected a context\. Fix: pass ctx=collection\.create_context"):
        collection.input_dist(None, batches()[0])
    with pytest.raises(ValueError, match=r"features is 'batch', expected a KeyedJaggedTensor\. Fix: "):
        collection.input_dist(collection.create_context(), "batch")

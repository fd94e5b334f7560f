"""A pipeline's steps are the plain loop's."""

import copy
import gc
from typing import Any

import pytest
import torch

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.data import RandomRecDataset
from recshard_lab.models import DLRM, DLRMTrain
from recshard_lab.train import EvalPipelineSparseDist, StageError, TrainPipelineBase, TrainPipelineSparseDist

CPU = torch.device("cpu")


def a_model() -> DLRMTrain:
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(name=n, num_embeddings=20, embedding_dim=4, feature_names=[n]) for n in "ab"]
    return DLRMTrain(DLRM(EmbeddingBagCollection(tables), 3, [4], [1]))


def data() -> RandomRecDataset:
    return RandomRecDataset(["a", "b"], 8, hash_size=20, num_dense=3, manual_seed=1, num_batches=4)


@pytest.mark.parametrize("kind", [TrainPipelineBase, TrainPipelineSparseDist])
def test_a_pipeline_trains_the_weights_of_the_plain_loop(kind: type[TrainPipelineBase]) -> None:
    model, plain = a_model(), a_model()
    pipeline = kind(model, torch.optim.SGD(model.parameters(), lr=0.5), CPU)
    batches, optimizer = iter(data()), torch.optim.SGD(plain.parameters(), lr=0.5)
    for batch in data():
        optimizer.zero_grad()
        loss, _ = plain(batch)
        loss.backward()
        optimizer.step()
        assert pipeline.progress(batches)[0] == loss
    with pytest.raises(StopIteration):
        pipeline.progress(batches)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Python(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_no_thread_collects_garbage_while_a_step_is_in_autograd() -> None:
    """What the collector sees of a graph changes without the GIL, so that a live node may look like garbage."""
    output = Python.apply(torch.ones(2, requires_grad=True))
    assert output.grad_fn in gc.get_referents(output)
    total = output.sum()
    assert output.grad_fn not in gc.get_referents(output), total

    seen = []
    model = a_model()
    model.register_forward_hook(lambda *_: seen.append(gc.isenabled()))
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: seen.append(gc.isenabled()))
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.5), CPU)
    pipeline.progress(iter(data()))
    assert seen == [False, False]
    assert gc.isenabled()

    model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(StageError, match="ZeroDivisionError"):
        pipeline.progress(iter(data()))
    assert gc.isenabled()


@pytest.mark.parametrize(("kind", "training"), [(TrainPipelineSparseDist, False), (EvalPipelineSparseDist, True)])
def test_a_model_that_is_evaluated_is_not_changed(kind: type[TrainPipelineBase], training: bool) -> None:
    model = a_model().train(training)
    before = copy.deepcopy(model.state_dict())
    pipeline = kind(model, torch.optim.SGD(model.parameters(), lr=0.5), CPU)
    loss, logits, labels = pipeline.progress(iter(data()))
    assert logits.shape == labels.shape == (8,)
    assert torch.isfinite(loss)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

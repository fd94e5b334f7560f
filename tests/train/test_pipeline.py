"""Pipelines in one process: garbage, evaluation, TorchRec's arguments (honoured or refused), and timed steps."""

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab import train
from recshard_lab.data import Batch, RandomRecDataset
from tests.train.pipeline_jobs import CPU, KEYS, unsharded_dlrm


def data() -> Iterator[Batch]:
    return iter(RandomRecDataset(KEYS, 8, hash_size=20, num_dense=3, manual_seed=1, num_batches=4))


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
    model = unsharded_dlrm()
    model.register_forward_hook(lambda *_: seen.append(gc.isenabled()))
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: seen.append(gc.isenabled()))
    pipeline = train.TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.5), CPU)
    pipeline.progress(data())
    assert seen == [False, False]
    assert gc.isenabled()

    model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(train.StageError, match="ZeroDivisionError"):
        pipeline.progress(data())
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("kind", "training"), [(train.TrainPipelineSparseDist, False), (train.EvalPipelineSparseDist, True)]
)
def test_a_model_that_is_evaluated_is_not_changed(kind: type[train.TrainPipelineBase], training: bool) -> None:
    model = unsharded_dlrm().train(training)
    before = copy.deepcopy(model.state_dict())
    pipeline = kind(model, torch.optim.SGD(model.parameters(), lr=0.5), CPU)
    loss, logits, labels = pipeline.progress(data())
    assert logits.shape == labels.shape == (8,)
    assert torch.isfinite(loss)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Square(nn.Module):
    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.w, self.order, self.batch = nn.Parameter(torch.ones(())), order, 0

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor]]:
        self.order.append(f"forward {self.batch}")
        self.batch += 1
        loss = (self.w * batch) ** 2
        return loss, (loss.detach(),)


def stages(after: bool, threads: bool) -> list[str]:
    """What happens in the first three steps: batches are read, and forwards run."""
    order: list[str] = []
    model = Square(order)

    def data() -> Iterator[torch.Tensor]:
        for number in range(6):
            order.append(f"load {number}")
            yield torch.tensor(float(number))

    batches = data()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with train.TrainPipelineSparseDist(model, sgd, CPU, enqueue_batch_after_forward=after, threads=threads) as pipeline:
        for _ in range(3):
            pipeline.progress(batches)
            pipeline.drain()
    return order


@pytest.mark.parametrize("threads", [False, True])
def test_a_batch_is_loaded_after_the_forward_of_the_batch_before_the_last(threads: bool) -> None:
    order = stages(True, threads)
    assert all(order.index(f"load {n + 2}") > order.index(f"forward {n}") for n in range(3)), order
    order = stages(False, False)
    assert all(order.index(f"load {n + 2}") < order.index(f"forward {n}") for n in range(3)), order


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"execute_all_batches": False, "enqueue_batch_after_forward": True},
            "with execute_all_batches=False: .* Fix:",
        ),
        ({"apply_jit": True}, r"apply_jit=True is not supported: \w+ .* Fix: leave it out"),
        ({"free_features_storage_early": True}, r"early=True is not supported: \w+ .* Fix: leave it out"),
        ({"enable_inplace_copy_batch": True, "device": "meta"}, "batch=True is not supported on meta: .* Fix:"),
    ],
)
def test_an_argument_is_refused_with_the_reason(options: dict[str, Any], message: str) -> None:
    model, options = Square([]), dict(options)
    sgd, device = torch.optim.SGD(model.parameters()), torch.device(options.pop("device", "cpu"))
    train.TrainPipelineSparseDist(model, sgd, CPU, enable_inplace_copy_batch=True)
    with pytest.raises(ValueError, match=message):
        train.TrainPipelineSparseDist(model, sgd, device, **options)


def test_an_override_that_no_pipeline_calls_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Mine overrides copy_batch_to_gpu\(\), which no pipeline calls: .* Fix:"):

        class Mine(train.TrainPipelineBase):
            def copy_batch_to_gpu(self, batches: Any) -> Any:
                return None


def test_timed_steps_return_the_losses_of_a_plain_loop_and_the_stages_of_all_steps() -> None:
    batches = [torch.tensor(3.0), torch.tensor(-1.0)]
    model, twin = Square([]), Square([])
    step = torch.optim.SGD(twin.parameters(), lr=0.1)
    expected = []
    for number in range(7):
        step.zero_grad()
        loss, _ = twin(batches[number % 2])
        loss.backward()
        step.step()
        expected.append(loss.item())
    with train.TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU) as pipeline:
        found = train.timed_steps(pipeline, batches, steps=5, warm_up=2)
    assert found.losses == expected
    assert {event.batch for event in found.events if event.stage == "backward"} == set(range(7))
    spent = sum(event.ms for event in found.events if event.stage == "backward" and event.batch >= 2)
    assert found.ms * 5 >= spent


@pytest.mark.parametrize(("batches", "steps"), [([], 5), ([torch.tensor(1.0)], 0)])
def test_timed_steps_need_a_batch_and_a_step(batches: list[torch.Tensor], steps: int) -> None:
    model = Square([])
    with (
        train.TrainPipelineBase(model, torch.optim.SGD(model.parameters()), CPU) as pipeline,
        pytest.raises(ValueError, match="Fix: pass a batch"),
    ):
        train.timed_steps(pipeline, batches, steps)

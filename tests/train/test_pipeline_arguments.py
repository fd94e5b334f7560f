"""TorchRec's arguments of pipelines: honoured, or refused with the reason."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab.train import TrainPipelineBase, TrainPipelineSparseDist

CPU = torch.device("cpu")


class Square(nn.Module):
    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.w, self.order, self.batch = nn.Parameter(torch.ones(())), order, 0

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.order.append(f"forward {self.batch}")
        self.batch += 1
        loss = (self.w * batch) ** 2
        return loss, loss.detach()


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
    with TrainPipelineSparseDist(model, sgd, CPU, enqueue_batch_after_forward=after, threads=threads) as pipeline:
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


def test_loading_after_the_forward_needs_all_batches() -> None:
    model = Square([])
    sgd = torch.optim.SGD(model.parameters())
    options = {"execute_all_batches": False, "enqueue_batch_after_forward": True}
    with pytest.raises(ValueError, match=r"enqueue_batch_after_forward=True with execute_all_batches=False: .* Fix:"):
        TrainPipelineSparseDist(model, sgd, CPU, **options)


@pytest.mark.parametrize("kind", [TrainPipelineBase, TrainPipelineSparseDist])
def test_copies_in_place_are_refused_on_a_gpu(kind: Any) -> None:
    model = Square([])
    sgd = torch.optim.SGD(model.parameters())
    kind(model, sgd, CPU, enable_inplace_copy_batch=True)
    with pytest.raises(ValueError, match=r"enable_inplace_copy_batch=True is not supported on meta: .* Fix:"):
        kind(model, sgd, torch.device("meta"), enable_inplace_copy_batch=True)


@pytest.mark.parametrize("name", ["apply_jit", "free_features_storage_early"])
def test_an_argument_is_refused_with_the_reason(name: str) -> None:
    model = Square([])
    with pytest.raises(ValueError, match=rf"{name}=True is not supported: \w+ .* Fix: leave it out"):
        TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters()), CPU, **{name: True})


def test_an_override_that_no_pipeline_calls_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Mine overrides copy_batch_to_gpu\(\), which no pipeline calls: .* Fix:"):

        class Mine(TrainPipelineBase):
            def copy_batch_to_gpu(self, batches: Any) -> Any:
                return None

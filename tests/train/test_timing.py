"""Timed steps: every step's loss in order, the stages, and what it needs."""

import pytest
import torch

from recshard_lab.train import TrainPipelineBase, timed_steps


class Square(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor]]:
        loss = (self.w - batch).square()
        return loss, (loss.detach(),)


def test_it_returns_the_losses_of_a_plain_loop_and_the_stages_of_all_steps() -> None:
    batches = [torch.tensor(3.0), torch.tensor(-1.0)]
    model, twin = Square(), Square()
    step = torch.optim.SGD(twin.parameters(), lr=0.1)
    expected = []
    for number in range(7):
        step.zero_grad()
        loss, _ = twin(batches[number % 2])
        loss.backward()
        step.step()
        expected.append(loss.item())
    with TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu")) as pipeline:
        found = timed_steps(pipeline, batches, steps=5, warm_up=2)
    assert found.losses == expected
    assert {event.batch for event in found.events if event.stage == "backward"} == set(range(7))
    spent = sum(event.ms for event in found.events if event.stage == "backward" and event.batch >= 2)
    assert found.ms * 5 >= spent


@pytest.mark.parametrize(("batches", "steps"), [([], 5), ([torch.tensor(1.0)], 0)])
def test_it_needs_a_batch_and_a_step(batches: list[torch.Tensor], steps: int) -> None:
    model = Square()
    with (
        TrainPipelineBase(model, torch.optim.SGD(model.parameters()), torch.device("cpu")) as pipeline,
        pytest.raises(ValueError, match="Fix: pass a batch"),
    ):
        timed_steps(pipeline, batches, steps)

"""Dense gradients are averaged in every step, whichever parameters a step uses; the wrapper is the user's to choose."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    RankError,
)
from recshard_lab.distributed import DefaultDataParallelWrapper, DMPCollection

STEPS: dict[str, list[tuple[list[int], list[int]]]] = {  # step -> rank -> the layers that it uses
    "the same each step": [([0, 1], [0, 1])] * 3,
    "others each step": [([0, 1], [0, 1]), ([0, 2], [0, 2]), ([0, 1, 2], [0, 1, 2]), ([2], [2])],
    "fewer and fewer": [([0, 1, 2], [0, 1, 2]), ([0, 1], [0, 1]), ([0], [0])],
    "other ones on each rank": [([0], [0, 1]), ([1, 2], [0]), ([2], [2])],
}


class Model(nn.Module):
    """Layers over a table, of which the caller names those that are used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, name="t", feature_names=["a"])])
        self.layers = nn.ModuleList([nn.Linear(4, 2) for _ in range(3)])

    def forward(self, batch: KeyedJaggedTensor, use: list[int], wrap: Any = None) -> Any:
        pooled = self.ebc(batch).values()
        rows = torch.cat([self.layers[n](pooled) for n in use], 1)
        return rows if wrap is None else wrap(rows)


def batch_of(rank: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], torch.tensor([rank, rank + 3, 5]), lengths=torch.tensor([1, 2]))


def optimizers(model: Any) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    layers = [p for name, p in model.named_parameters() if "layers" in name]
    return torch.optim.Adam(layers, lr=0.1, weight_decay=0.1), layers  # moves what has a gradient, be it zeros


def seen(layers: list[nn.Parameter]) -> list[tuple[Tensor | None, Tensor]]:
    return [(None if p.grad is None else p.grad.clone(), p.detach().clone()) for p in layers]


def unsharded(steps: list[tuple[list[int], list[int]]]) -> Any:
    """Both batches in one process; SGD of the default sharder on the table."""
    model = Model()
    adam, layers = optimizers(model)
    table, found = model.ebc.embedding_bags["t"].weight, []
    for uses in steps:
        loss = torch.zeros(())
        for rank, use in enumerate(uses):
            loss = loss + model(batch_of(rank), use).square().sum() / 2
        model.zero_grad()
        loss.backward()
        adam.step()
        with torch.no_grad():
            table -= 0.01 * table.grad
        found.append(seen(layers))
    return found


def sharded(steps: list[tuple[list[int], list[int]]], two_dimensional: bool, wrapper: Any, wrap: Any) -> Any:
    """The same on two ranks. Runs on every rank."""
    rank = torch.distributed.get_rank()
    if two_dimensional:
        dmp: Any = DMPCollection(Model(), "cpu", None, 2, 1, None, data_parallel_wrapper=wrapper)
    else:
        dmp = DistributedModelParallel(Model(), data_parallel_wrapper=wrapper)
    adam, layers = optimizers(dmp)
    found = []
    for uses in steps:
        out = dmp(batch_of(rank), uses[rank], wrap)
        rows = out if wrap is None else unwrapped(out)
        dmp.zero_grad()
        rows.square().sum().backward()
        adam.step()
        if two_dimensional:
            dmp.sync()
        found.append(seen(layers))
    return found


def keyed(rows: Tensor) -> Any:
    return {"nested": [KeyedTensor(["k"], [rows.shape[1]], rows)], "words": "and a string"}


class Opaque:
    """What torch cannot look into."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


def unwrapped(out: Any) -> Tensor:
    return out.rows if isinstance(out, Opaque) else out["nested"][0].values()


def compare(found: Any, truth: Any) -> None:
    for own in found:
        for step, (layers, expected) in enumerate(zip(own, truth, strict=True)):
            for (grad, weight), (grad_truth, weight_truth) in zip(layers, expected, strict=True):
                assert (grad is None) == (grad_truth is None), f"step {step}"
                if grad is not None:
                    torch.testing.assert_close(grad, grad_truth, msg=f"gradient in step {step}")
                torch.testing.assert_close(weight, weight_truth, rtol=1e-4, atol=1e-4, msg=f"weight in step {step}")


@pytest.mark.gate
@pytest.mark.parametrize("two_dimensional", [False, True], ids=["DMP", "2D"])
@pytest.mark.parametrize("steps", STEPS)
def test_gradients_are_averaged_in_every_step(two: Any, steps: str, two_dimensional: bool) -> None:
    found = two.run(sharded, STEPS[steps], two_dimensional, None, None)
    if not two_dimensional:  # replicas of tables step apart, each with its own batch
        compare(found, unsharded(STEPS[steps]))
    for one, other in zip(*found, strict=True):
        assert all(
            (a[0] is None) == (b[0] is None) and torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True)
        )


def test_outputs_may_be_any_pytree(two: Any) -> None:
    steps = STEPS["other ones on each rank"]
    compare(two.run(sharded, steps, False, None, keyed), unsharded(steps))


def test_outputs_that_hide_their_tensors_are_refused(two: Any) -> None:
    with pytest.raises(RankError, match=r"(?s)the model returns a Opaque, .*Fix: return tensors, dicts"):
        two.run(sharded, STEPS["the same each step"], False, None, Opaque)
    all_used = [([0, 1, 2], [0, 1, 2])] * 2
    plain = DefaultDataParallelWrapper(find_unused_parameters=False)
    compare(two.run(sharded, all_used, False, plain, Opaque), unsharded(all_used))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"allreduce_comm_precision": "fp8"}, "allreduce_comm_precision='fp8' is not supported"),
        ({"static_graph": True, "find_unused_parameters": True}, "mutually exclusive"),
    ],
)
def test_options_that_contradict_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DefaultDataParallelWrapper(**arguments)

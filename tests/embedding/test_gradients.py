"""Gradients that are not finite, and numbers of steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab.embedding import (
    DataType,
    EmbeddingBagConfig,
    EmbOptimType,
    FusedEmbeddingBagCollection,
    OptimizerSpec,
    apply_optimizer_in_backward,
)
from recshard_lab.embedding.kernels import Slot, choose_kernel
from recshard_lab.embedding.kernels.native import NativeKernel
from recshard_lab.optim import LAMB, LarsSGD, PartialRowWiseAdam, RowWiseAdagrad
from recshard_lab.sparse import KeyedJaggedTensor

CHECKED = OptimizerSpec(EmbOptimType.ADAM, check_gradients=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_named_before_a_weight_moves(bad: float) -> None:
    slots = [Slot("users", 5, 4, DataType.FP32, 4), Slot("movies", 9, 4, DataType.FP32, 4, first_row=100)]
    kernel = NativeKernel(slots, [0, 1], CHECKED, pooled=True, device="cpu")
    _, saved = kernel.forward(torch.tensor([1, 2, 6, 6]), torch.tensor([0, 1, 2, 3, 4]), None)
    grad = torch.ones(2, 8)
    grad[1, 5] = bad
    message = r"table 'movies', row 106, is not finite \(1 of 4 numbers; 1 such rows at hand\): no weight"
    with pytest.raises(ValueError, match=message):
        kernel.backward(saved, grad)
    assert not any(weight.any() for weight in kernel.weights())
    assert not any(state.any() for states in kernel.optimizer_states() for state in states.values())
    grad[1, 5] = 1.0
    kernel.backward(saved, grad)
    assert all(weight.any() for weight in kernel.weights())


def test_checking_is_refused_by_kernels_that_do_not_check_and_native_is_taken() -> None:
    slots = [Slot("t", 4, 4, DataType.FP32, 4)]
    spec = OptimizerSpec(check_gradients=True)
    chosen = choose_kernel(slots, spec, pooled=True, weighted=False, exchanges_row_norms=False, device="cpu")
    assert chosen is NativeKernel


def test_tables_that_have_taken_different_numbers_of_steps_are_each_corrected_by_their_own() -> None:
    """As after loading one of them from a checkpoint."""
    spec, lengths = OptimizerSpec(EmbOptimType.ADAM, 0.1), torch.tensor([0, 1, 2])
    slots = [Slot(name, 3, 4, DataType.FP32, 4) for name in "ab"]
    together = NativeKernel(slots, [0, 1], spec, pooled=True, device="cpu")
    apart = [NativeKernel([slot], [0], spec, pooled=True, device="cpu") for slot in slots]
    together.optimizer_states()[1]["iter"].fill_(5)
    apart[1].optimizer_states()[0]["iter"].fill_(5)
    for _ in range(2):
        _, saved = together.forward(torch.tensor([1, 2]), lengths, None)
        together.backward(saved, torch.ones(1, 8))
        for number, kernel in enumerate(apart):
            _, saved = kernel.forward(torch.tensor([number + 1]), lengths[:2], None)
            kernel.backward(saved, torch.ones(1, 4))
    for number, kernel in enumerate(apart):
        torch.testing.assert_close(together.weights()[number], kernel.weights()[0])
    assert not torch.equal(*together.weights())


@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [
        (RowWiseAdagrad, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.2}),
        (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.2, "betas": (0.7, 0.9)}),
        (PartialRowWiseAdam, {"lr": 0.1}),
        (LAMB, {"lr": 0.1, "weight_decay": 0.1}),
        (LarsSGD, {"lr": 0.1, "eta": 0.5}),
    ],
)
def test_an_optimizer_in_backward_and_its_fused_twin_step_alike(optimizer: Any, kwargs: dict[str, Any]) -> None:
    """Every row is touched in every step: then the dense optimizer is the truth as it stands."""
    torch.manual_seed(0)
    table = EmbeddingBagConfig(3, 4, "t", feature_names=["f"])
    fused = FusedEmbeddingBagCollection([table], optimizer, kwargs, backend="native")
    weight = nn.Parameter(fused.embedding_bags["t"].weight.detach().clone())
    apply_optimizer_in_backward(optimizer, [weight], kwargs)
    for _ in range(4):
        ids = torch.tensor([0, 1, 2, 2, 1, 0, 0])
        features = KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([3, 4]))
        mixing = torch.randn(2, 4)
        (fused(features).values() * mixing).sum().backward()
        (torch.stack([weight[ids[:3]].sum(0), weight[ids[3:]].sum(0)]) * mixing).sum().backward()
        torch.testing.assert_close(fused.embedding_bags["t"].weight.detach(), weight.detach(), atol=1e-6, rtol=1e-5)
        assert weight.grad is None

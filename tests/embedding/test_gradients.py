"""Backward against numbers: torch's gradcheck in float64, and gradients that are not finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab.embedding import (
    DataType,
    EmbeddingBagConfig,
    EmbOptimType,
    FusedEmbeddingBagCollection,
    OptimizerSpec,
    PoolingType,
    apply_optimizer_in_backward,
)
from recshard_lab.embedding.kernels import Slot, choose_kernel
from recshard_lab.embedding.kernels.native import NativeKernel
from recshard_lab.optim import LAMB, LarsSGD, PartialRowWiseAdam
from recshard_lab.sparse import KeyedJaggedTensor
from tests.embedding.lookups import SHAPE, Shape, make

SEQUENCE = Shape(((7, 4), (5, 4)), (1, 0, 1), ((2, 0, 3), (1, 1, 0), (4, 0, 1)), seed=0)


class Through(torch.autograd.Function):
    """A dense kernel as a function of its tables and of the per-sample weights."""

    @staticmethod
    def forward(ctx: Any, kernel: NativeKernel, shape: Shape, weights: Tensor | None, *tables: Tensor) -> Tensor:
        for own, table in zip(kernel.weights(), tables, strict=True):
            own.copy_(table)
            own.grad = None
        out, ctx.saved = kernel.forward(shape.ids(), shape.offsets(kernel.pooled), weights)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        for own in ctx.kernel.weights():
            own.grad = None
        weight_grad = ctx.kernel.backward(ctx.saved, grads[0])
        return None, None, weight_grad, *[own.grad.clone() for own in ctx.kernel.weights()]


@pytest.mark.parametrize("mode", ["sum", "weighted", "sequence"])
def test_the_dense_kernel_passes_gradcheck(mode: str) -> None:
    shape = SEQUENCE if mode == "sequence" else SHAPE
    kernel = make(NativeKernel, shape, None, mode != "sequence", data_type=DataType.FP64)
    torch.manual_seed(0)
    tables = [torch.randn(rows, cols, dtype=torch.float64, requires_grad=True) for rows, cols in shape.slots]
    count = shape.ids().numel()
    weights = torch.randn(count, dtype=torch.float64, requires_grad=True) if mode == "weighted" else None

    def run(weights: Tensor | None, *tables: Tensor) -> Tensor:
        return Through.apply(kernel, shape, weights, *tables)

    assert torch.autograd.gradcheck(run, (weights, *tables), fast_mode=False)


class Stepped(torch.autograd.Function):
    """A fused collection as a function of its tables: under SGD with a rate of 1 a step is the gradient.

    A lookup can be gone back through once, and gradcheck goes back once for each number of the output: backward looks
    up again.
    """

    @staticmethod
    def forward(ctx: Any, fused: FusedEmbeddingBagCollection, features: Any, weights: Any, *tables: Tensor) -> Tensor:
        ctx.fused, ctx.features, ctx.tables = fused, features, [table.clone() for table in tables]
        ctx.weights = None if weights is None else weights.detach().clone()
        return Stepped.look_up(ctx, ctx.weights)

    @staticmethod
    def look_up(ctx: Any, weights: Tensor | None) -> Tensor:
        for own, table in zip(ctx.fused.embedding_bags.values(), ctx.tables, strict=True):
            own.weight.detach().copy_(table)
        return ctx.fused(ctx.features(weights)).values()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weights = None if ctx.weights is None else ctx.weights.clone().requires_grad_()
        with torch.enable_grad():
            Stepped.look_up(ctx, weights).backward(grads[0])
        held = [own.weight.detach() for own in ctx.fused.embedding_bags.values()]
        steps = [table - own for table, own in zip(ctx.tables, held, strict=True)]
        return None, None, None if weights is None else weights.grad, *steps


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_fused_collection_passes_gradcheck(pooling: PoolingType, weighted: bool) -> None:
    tables = [
        EmbeddingBagConfig(5, 3, "a", feature_names=["f", "g"], pooling=pooling, data_type=DataType.FP64),
        EmbeddingBagConfig(4, 2, "b", feature_names=["g"], pooling=PoolingType.SUM, data_type=DataType.FP64),
    ]
    fused = FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 1.0}, is_weighted=weighted, backend="native")
    torch.manual_seed(0)
    values, lengths = torch.tensor([0, 4, 4, 1, 2, 2, 3]), torch.tensor([3, 0, 1, 1, 2, 0])

    def features(weights: Tensor | None) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["f", "g"], values, weights, lengths=lengths)

    inputs = [torch.randn(t.num_embeddings, t.embedding_dim, dtype=torch.float64, requires_grad=True) for t in tables]
    weights = torch.rand(7, dtype=torch.float64, requires_grad=True) if weighted else None

    def run(weights: Tensor | None, *tables: Tensor) -> Tensor:
        return Stepped.apply(fused, features, weights, *tables)

    assert torch.autograd.gradcheck(run, (weights, *inputs), fast_mode=False)


# ---- gradients that are not finite ----

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


def test_steps_are_counted_once_a_backward_with_or_without_ids() -> None:
    spec = replace(CHECKED, check_gradients=False)
    kernel = NativeKernel([Slot("t", 4, 4, DataType.FP32, 4)], [0], spec, pooled=True, device="cpu")
    for ids in ([0, 1], [], [1, 1]):
        offsets = torch.tensor([0, len(ids)])
        _, saved = kernel.forward(torch.tensor(ids, dtype=torch.int64), offsets, None)
        kernel.backward(saved, torch.ones(1, 4))
    assert kernel.optimizer_states()[0]["iter"].tolist() == [3]


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

"""Every kernel gives the numbers of plain autograd and plain torch optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from recshard_lab.embedding import DataType, EmbOptimType, OptimizerSpec
from recshard_lab.embedding.kernels import KernelSpec, LookupKernel, ShardSpec, available, choose_kernel, kernel_named
from recshard_lab.embedding.kernels.native import NativeKernel
from tests.embedding.lookups import KERNELS, PAIRS, SHAPE, SPECS, Shape, Truth, can, look_up, make, shapes

each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.optimizer.name)
each_pair = pytest.mark.parametrize(
    ("kernel", "spec"), [pytest.param(k, s, id=f"{k.name}-{s.optimizer.name}") for k, s in PAIRS]
)
ANY_BATCH = 1e-4
"""Allowed difference of weights for any batch. Where gradients of a row nearly cancel, Adagrad divides their sum by
`eps`, and rounding of 3e-7 grows by learning rate / eps = 300."""
ROWWISE = OptimizerSpec(EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.3, eps=1e-3)


def assert_same(given: list[Tensor], truth: list[Tensor | None], atol: float = 1e-5) -> None:
    for own, expected in zip(given, truth, strict=True):
        assert expected is not None
        torch.testing.assert_close(own.float(), expected.detach().float(), atol=atol, rtol=1e-5)


def run_steps(
    kernel: LookupKernel, truth: Truth, pooled: bool, weighted: bool, steps: int = 3, atol: float = 1e-5
) -> None:
    truth.fill(kernel)
    shape = truth.shape
    for number in range(steps):
        ids = shape.ids(torch.int32 if number % 2 else torch.int64)
        weights = torch.rand(ids.shape[0]) - 0.3 if weighted else None
        expected_weights = None if weights is None else weights.clone().requires_grad_()
        out, saved = look_up(kernel, ids, shape.offsets(pooled), weights)
        expected = truth.forward(ids, expected_weights)
        assert_same([out], [expected])
        grad = torch.randn_like(out)
        expected.backward(grad)
        weight_grad = kernel.backward(saved, grad)
        if expected_weights is None:
            assert weight_grad is None
        else:
            assert weight_grad is not None
            assert weight_grad.shape == ids.shape
            if ids.numel():
                assert_same([weight_grad], [expected_weights.grad], atol=1e-4)
        truth.step()
        assert_same(kernel.weights(), [table.detach() for table in truth.tables], atol)


@each_pair
@pytest.mark.parametrize("mode", ["sum", "weighted", "sequence"])
def test_steps_equal_autograd_and_a_dense_optimizer(kernel: type[LookupKernel], spec: OptimizerSpec, mode: str) -> None:
    pooled = mode != "sequence"
    shape = SHAPE if pooled else Shape(((7, 4), (5, 4)), (1, 0, 1), ((2, 0, 3), (1, 1, 0), (4, 0, 1)), seed=0)
    run_steps(make(kernel, shape, spec, pooled), Truth(shape, spec, pooled), pooled, mode == "weighted")


@each_kernel
@pytest.mark.parametrize("pooled", [True, False])
@given(shape=shapes())
@settings(max_examples=30, deadline=None)
def test_any_jagged_batch_is_stepped_as_by_autograd(kernel: type[LookupKernel], pooled: bool, shape: Shape) -> None:
    specs = [ROWWISE] if pooled else [spec for spec in SPECS if can(kernel, spec)]
    spec, weighted = specs[shape.seed % len(specs)], pooled and shape.seed % 2 == 0
    run_steps(make(kernel, shape, spec, pooled), Truth(shape, spec, pooled), pooled, weighted, 2, ANY_BATCH)


@each_kernel
def test_an_id_in_two_features_of_one_slot_is_stepped_once(kernel: type[LookupKernel]) -> None:
    shape = Shape(((3, 4), (3, 4)), (0, 1, 0), ((1,), (1,), (1,)), seed=0)
    table = make(kernel, shape, ROWWISE, True)
    _, saved = look_up(table, torch.tensor([2, 1, 2]), shape.offsets(True))
    table.backward(saved, torch.ones(1, 12))
    # coalesced gradient 2, mean square 4: w -= 0.3 * 2 / (2 + eps); stepped twice it would be 0.3 / 1 + 0.3 / sqrt 2
    torch.testing.assert_close(table.optimizer_states()[0]["momentum1"], torch.tensor([0.0, 0.0, 4.0]))
    torch.testing.assert_close(table.weights()[0][2], torch.full((4,), -0.3 * 2 / 2.001))


@pytest.mark.parametrize(
    ("kernel", "spec", "data_type"),
    [
        *[pytest.param(k, s, DataType.FP16, id=f"{k.name}-{s.optimizer.name}") for k, s in PAIRS],
        *[pytest.param(NativeKernel, s, DataType.FP64, id=f"double-{s.optimizer.name}") for s in SPECS],
    ],
)
def test_half_precision_is_summed_and_stepped_in_single_and_double_in_double(
    kernel: type[LookupKernel], spec: OptimizerSpec, data_type: DataType
) -> None:
    computed = torch.float64 if data_type is DataType.FP64 else torch.float32
    table, truth = make(kernel, SHAPE, spec, True, data_type=data_type), Truth(SHAPE, spec, True, computed)
    with torch.no_grad():
        for parameter in truth.tables:
            parameter.copy_(parameter.half())
    truth.fill(table)
    out, saved = look_up(table, SHAPE.ids(), SHAPE.offsets(True))
    expected = truth.forward(SHAPE.ids(), None)
    assert out.dtype == computed
    assert_same([out], [expected])  # no rounding to half in between
    grad = torch.randn_like(out)
    expected.backward(grad)
    table.backward(saved, grad)
    truth.step()
    atol, rtol = (1e-12, 1e-12) if computed is torch.float64 else (2e-3, 1e-5)
    for own, parameter in zip(table.weights(), truth.tables, strict=True):
        torch.testing.assert_close(own, parameter.detach().to(own.dtype), atol=atol, rtol=rtol)


@each_kernel
def test_a_slot_that_no_feature_reads_keeps_its_weights(kernel: type[LookupKernel]) -> None:
    shards = [ShardSpec("read", 3, 4, DataType.FP32, 4), ShardSpec("unread", 2, 8, DataType.FP32, 8)]
    table = kernel(KernelSpec(shards, [0], ROWWISE))
    table.weights()[1].fill_(7)
    out, saved = look_up(table, torch.tensor([0]), torch.tensor([0, 1]))
    table.backward(saved, torch.ones_like(out))
    assert out.shape == (1, 4)
    assert torch.equal(table.weights()[1], torch.full((2, 8), 7.0))


@each_kernel
def test_a_row_is_stepped_alike_to_the_last_bit_whatever_other_slots_the_kernel_has(kernel: type[LookupKernel]) -> None:
    """Replicas of a rectangle on two ranks: each in a kernel with other rectangles, they must stay equal."""
    replica, other = ShardSpec("t", 3, 4, DataType.FP32, 4), ShardSpec("u", 1000, 4, DataType.FP32, 4)
    drawn = torch.Generator().manual_seed(0)
    for _ in range(50):
        ids, grad = torch.randint(0, 3, (40,), generator=drawn), torch.randn(40, 4, generator=drawn)
        stepped = []
        for shards, count in (([replica], 0), ([other, replica], 300)):
            own = kernel(KernelSpec(shards, list(range(len(shards))), OptimizerSpec(), False))
            others = torch.randint(0, 1000, (count,), generator=drawn)
            ends = torch.tensor([0, 40] if not count else [0, count, count + 40])
            _, saved = look_up(own, torch.cat([others, ids]), ends)
            own.backward(saved, torch.cat([torch.randn(count, 4, generator=drawn), grad]).view(-1))
            stepped.append(own.weights()[-1].clone())
        assert torch.equal(*stepped)


@each_pair
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("weight_decay", "max_norm"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1.0)])
def test_two_column_slots_whose_squares_meet_step_as_one_whole_slot(
    kernel: type[LookupKernel], spec: OptimizerSpec, weight_decay: float, max_norm: float, weighted: bool
) -> None:
    spec = replace(spec, weight_decay=weight_decay, max_norm=max_norm)
    half = [ShardSpec("a", 5, 4, DataType.FP32, 8)]
    if kernel.refuses(KernelSpec(half, [0], spec, weighted=weighted, joins_norms=spec.row_wise)):
        return  # said by name, as another test holds
    lengths = ((2, 0, 3), (1, 2, 0))
    whole_shape = Shape(((5, 8), (4, 4)), (0, 1), lengths, seed=3)
    whole = make(NativeKernel, whole_shape, spec, True)
    # columns 0-3 and 4-7 of the first table, and another table of the same width in the same group
    shards = [half[0], ShardSpec("b", 4, 4, DataType.FP32, 4), half[0]]
    pieces = kernel(KernelSpec(shards, [0, 1, 2], spec))
    truth = Truth(whole_shape, spec, True)
    truth.fill(whole)
    left, right = truth.tables[0].detach().split(4, dim=1)
    for weight, part in zip(pieces.weights(), (left, truth.tables[1].detach(), right), strict=True):
        weight.copy_(part)

    calls = []

    def row_norms(rows: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
        calls.append(1)
        assert torch.equal(rows[0], rows[2])
        assert all(torch.equal(own, own.unique()) for own in rows)
        both = squares[0] + squares[2]
        return [both, squares[1], both]

    ids = whole_shape.ids()
    first, second = ids.split([5, 3])
    piece_ids, piece_lengths = torch.cat([first, second, first]), torch.tensor([*lengths[0], *lengths[1], *lengths[0]])
    offsets = torch.nn.functional.pad(piece_lengths.cumsum(0), (1, 0))
    weights = torch.rand(8) if weighted else None
    piece_weights = None if weights is None else torch.cat([weights, weights[:5]])
    for _ in range(3):
        out, saved = look_up(whole, ids, whole_shape.offsets(True), weights)
        _, piece_saved = look_up(pieces, piece_ids, offsets, piece_weights)
        grad = torch.randn_like(out)
        whole.backward(saved, grad)
        a, b = grad.split([8, 4], dim=1)
        pieces.backward(piece_saved, torch.cat([a[:, :4], b, a[:, 4:]], dim=1), row_norms if spec.row_wise else None)
    got = pieces.weights()
    assert_same([torch.cat([got[0], got[2]], dim=1), got[1]], whole.weights())
    assert len(calls) == 3 * spec.row_norm_rounds
    for name, state in whole.optimizer_states()[0].items():
        parts = [pieces.optimizer_states()[slot][name] for slot in (0, 2)]  # "iter" and row states: one copy a piece
        assert_same([torch.cat(parts, dim=1) if state.dim() == 2 else parts[0]], [state])


@pytest.mark.parametrize("name", sorted({"native", "numba"} & set(available())))
def test_column_slots_without_the_other_columns_squares_are_refused(name: str) -> None:
    kernel = kernel_named(name)(KernelSpec([ShardSpec("a", 5, 4, DataType.FP32, 8)], [0], ROWWISE))
    _, saved = look_up(kernel, torch.tensor([0]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="'a' has 4 of its 8 columns here"):
        kernel.backward(saved, torch.ones(1, 4))


@given(shape=shapes(dims=(3, 4)))
@settings(max_examples=30, deadline=None)
def test_the_dense_kernel_adds_up_the_gradients_of_autograd(shape: Shape) -> None:
    kernel, truth = make(NativeKernel, shape, None, True), Truth(shape, None, True)
    truth.fill(kernel)
    for _ in range(2):  # gradients add up until they are cleared
        out, saved = look_up(kernel, shape.ids(), shape.offsets(True))
        grad = torch.randn_like(out)
        truth.forward(shape.ids(), None).backward(grad)
        kernel.backward(saved, grad)
    for weight, table in zip(kernel.weights(), truth.tables, strict=True):
        assert weight.grad is not None
        assert table.grad is not None
        assert_same([weight.grad], [table.grad])


def test_many_rows_are_stepped_chunk_by_chunk() -> None:
    shape = Shape(((9000, 64),), (0,), ((9000,),), seed=0)  # 2.3 MB of gradient, several cachefuls
    kernel, truth = make(NativeKernel, shape, SPECS[0], True), Truth(shape, SPECS[0], True)
    truth.fill(kernel)
    ids = torch.randperm(9000)
    _, saved = look_up(kernel, ids, shape.offsets(True))
    kernel.backward(saved, torch.ones(1, 64))
    assert_same(kernel.weights(), [truth.tables[0].detach() - 0.3])


def test_a_kernel_that_cannot_is_refused_by_name_with_its_reason() -> None:
    spec = KernelSpec([ShardSpec("odd", 4, 3, DataType.FP32, 3)], [0], ROWWISE)
    assert choose_kernel(spec).name == ("numba" if "numba" in available() else "native")
    if "fbgemm" in available():
        with pytest.raises(ValueError, match=r"'odd' has 3 columns here; it needs a multiple of 4.*native"):
            choose_kernel(spec, backend="fbgemm")
    with pytest.raises(ValueError, match=r"kernel 'tbe' is not registered. Fix: choose one of .*native"):
        kernel_named("tbe")
    with pytest.raises(ValueError, match="'odd' is INT4"):
        choose_kernel(spec._replace(shards=[ShardSpec("odd", 4, 4, DataType.INT4, 4)]))


@each_spec
def test_the_fastest_of_the_kernels_that_can_is_taken(spec: OptimizerSpec) -> None:
    chosen = choose_kernel(KernelSpec([ShardSpec("a", 4, 4, DataType.FP32, 4)], [0], spec))
    fbgemms = {EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    fastest = [("numba", fbgemms | {EmbOptimType.EXACT_ADAGRAD}), ("fbgemm", fbgemms), ("native", set(EmbOptimType))]
    assert chosen.name == next(name for name, can in fastest if name in available() and spec.optimizer in can)


@each_kernel
def test_what_a_kernel_cannot_do_is_said_not_ignored(kernel: type[LookupKernel]) -> None:
    sequence = kernel(KernelSpec([ShardSpec("a", 4, 4, DataType.FP32, 4)], [0], ROWWISE, pooled=False))
    with pytest.raises(ValueError, match="sequence embeddings take no per-sample weights"):
        look_up(sequence, torch.tensor([0]), torch.tensor([0, 1]), torch.ones(1))


@pytest.mark.parametrize(
    ("name", "spec", "changes", "reason"),
    [
        ("fbgemm", None, {}, "keeps no gradients"),
        ("fbgemm", OptimizerSpec(weight_decay=0.1), {}, "weight_decay"),
        ("fbgemm", ROWWISE, {"joins_norms": True}, "norms of whole rows"),
        ("fbgemm", ROWWISE, {"device": torch.device("mps")}, "not on mps"),
        ("numba", None, {}, "keeps no gradients"),
        ("numba", OptimizerSpec(EmbOptimType.ADAM), {}, "it has no loop for adam"),
        ("numba", OptimizerSpec(gradient_clipping=True, max_norm=1.0), {}, "it has no gradient_clipping, max_norm"),
        ("numba", OptimizerSpec(weight_decay=0.1, weight_decay_mode="DECOUPLE"), {}, "no weight_decay_mode"),  # type: ignore[arg-type]
        ("numba", ROWWISE, {"device": torch.device("cuda")}, "not on cuda"),
        ("numba", ROWWISE, {"slot": (4, DataType.BF16)}, "'a' is BF16; it trains FP32 and FP16"),
        ("numba", ROWWISE, {"slot": (2**32 + 1, DataType.FP32)}, "it sorts at most 4294967296"),
    ],
)
def test_a_kernel_names_what_it_does_not_have(name: str, spec: OptimizerSpec | None, changes: Any, reason: str) -> None:
    if name not in available():
        pytest.skip(f"needs {name}")
    rows, data_type = changes.get("slot", (4, DataType.FP32))
    given = {name: value for name, value in changes.items() if name != "slot"}
    refusal = kernel_named(name).refuses(KernelSpec([ShardSpec("a", rows, 4, data_type, 4)], [0], spec, **given))
    assert refusal is not None
    assert reason in refusal

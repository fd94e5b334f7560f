"""The numba kernel: threads change no number, ids of any width, rows of any width, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recshard_lab.embedding import DataType, EmbOptimType, OptimizerSpec
from recshard_lab.embedding.kernels import KernelInput, KernelSpec, LookupKernel, ShardSpec, available, kernel_named
from recshard_lab.embedding.kernels.numba import threads
from tests.embedding.lookups import look_up

pytestmark = pytest.mark.skipif("numba" not in available(), reason="needs numba")

SGD = OptimizerSpec(EmbOptimType.EXACT_SGD, 0.1)
ADAGRAD = OptimizerSpec(EmbOptimType.EXACT_ADAGRAD, 0.1)
ROWWISE = OptimizerSpec(EmbOptimType.EXACT_ROWWISE_ADAGRAD, 0.1)
SPECS = [SGD, replace(SGD, weight_decay=0.1), ADAGRAD, ROWWISE, replace(ROWWISE, weight_decay=0.1)]


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However small the work."""
    monkeypatch.setattr(threads, "_SMALL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def make(slots: list[tuple[int, int]], features: list[int], spec: OptimizerSpec, **settings: object) -> LookupKernel:
    kind = kernel_named(str(settings.get("name", "numba")))
    data_type = settings.get("data_type", DataType.FP32)
    rectangles = [ShardSpec(f"t{i}", rows, cols, data_type, cols) for i, (rows, cols) in enumerate(slots)]  # type: ignore[arg-type]
    kernel = kind(KernelSpec(rectangles, features, spec, bool(settings.get("pooled", True))))
    for number, weight in enumerate(kernel.weights()):
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    return kernel


def draw(slots: list[tuple[int, int]], features: list[int], batch: int, pooled: bool = True) -> tuple[Tensor, Tensor]:
    """Ids of which some come often, in bags of 0 to 5."""
    lengths = torch.randint(0, 6, (len(features), batch))
    rows = [
        (torch.rand(int(own.sum())) ** 3 * slots[feature][0]).long()
        for feature, own in zip(features, lengths, strict=True)
    ]
    flat = lengths.flatten() if pooled else lengths.sum(1)
    return torch.cat(rows), torch.nn.functional.pad(flat.cumsum(0), (1, 0))


def train(kernel: LookupKernel, batches: list[tuple[Tensor, Tensor]], weights: bool) -> list[Tensor]:
    """Everything there is after some steps."""
    told = []
    for number, (ids, offsets) in enumerate(batches):
        generator = torch.Generator().manual_seed(number)
        own = torch.rand(ids.numel(), generator=generator) if weights else None
        out, saved = look_up(kernel, ids, offsets, own)
        gradient = kernel.backward(saved, torch.randn(out.shape, generator=generator))
        told += [out] if gradient is None else [out, gradient]
    return [*told, *kernel.weights(), *(s for own in kernel.optimizer_states() for s in own.values())]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.optimizer}-{spec.weight_decay}")
@pytest.mark.parametrize("mode", ["sum", "weighted", "sequence"])
@pytest.mark.parametrize(
    ("slots", "features"),
    [([(50, 8), (40, 20), (30, 8), (20, 64)], [0, 1, 2, 3, 1]), ([(500, 24)], [0]), ([(9, 4), (800, 40)], [1, 0, 1])],
    ids=["even", "one table", "uneven"],
)
def test_threads_change_no_number(
    request: pytest.FixtureRequest, spec: OptimizerSpec, mode: str, slots: list, features: list
) -> None:
    torch.manual_seed(0)
    pooled = mode != "sequence"
    batches = [draw(slots, features, 40, pooled) for _ in range(3)]
    alone = train(make(slots, features, spec, pooled=pooled), batches, mode == "weighted")
    request.getfixturevalue("three_threads")
    together = train(make(slots, features, spec, pooled=pooled), batches, mode == "weighted")
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.optimizer}-{spec.weight_decay}")
@pytest.mark.parametrize("width", [1, 3, 7, 16, 33, 100, 200, 383])
def test_rows_of_any_width_are_looked_up_and_stepped_as_by_torch(spec: OptimizerSpec, width: int) -> None:
    torch.manual_seed(width)
    slots, features = [(3000, width), (17, 5)], [0, 1, 0]
    batches = [draw(slots, features, 150) for _ in range(3)]
    own = train(make(slots, features, spec), [(ids.int(), offsets) for ids, offsets in batches], True)
    truth = train(make(slots, features, spec, name="native"), batches, True)
    for one, other in zip(own, truth, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", [SGD, ROWWISE], ids=str)
def test_a_row_beyond_two_billion_numbers_is_found(spec: OptimizerSpec) -> None:
    rows = 2**31 // 512 + 3  # 4.3 GB of weights, of which only the touched pages are ever had
    kernel = kernel_named("numba")(KernelSpec([ShardSpec("t", rows, 512, DataType.FP16, 512)], [0], spec))
    for _ in range(2):
        out, saved = look_up(kernel, torch.tensor([rows - 1, 0]), torch.tensor([0, 1, 2]))
        kernel.backward(saved, torch.ones_like(out))
    weight = kernel.weights()[0]
    assert weight[rows - 1].ne(0).all()
    assert torch.equal(weight[rows - 1], weight[0])
    assert not weight[1].any()


def test_gradients_of_any_layout_are_read_right() -> None:
    slots, features = [(50, 8), (40, 20)], [0, 1]
    ids, offsets = draw(slots, features, 20)
    grad = torch.randn(20, 28)
    stepped = []
    for layout in (grad, grad.t().contiguous().t(), torch.cat([grad, grad], 1)[:, :28], grad.double()):
        kernel = make(slots, features, ROWWISE)
        kernel.backward(look_up(kernel, ids, offsets)[1], layout)
        stepped.append(kernel.weights()[1])
    assert all(torch.equal(stepped[0], own) for own in stepped[1:])


BAD = {
    "an id past the end": ([0, 5, 1], [0, 1, 2, 3, 3], "id 5 is not a row of table 't0', which has rows 0 to 4 here"),
    "a negative id": ([0, 1, -1], [0, 1, 2, 3, 3], "id -1 is not a row of table 't1'"),
    "an id for a table without rows": ([0, 1, 0], [0, 1, 2, 2, 2, 2, 3], "id 0 is not a row of table 't2'"),
    "the largest number": ([2**31 - 1, 1, 0], [0, 1, 2, 3, 3], "id 2147483647 is not a row"),
    "offsets past the ids": ([0, 1, 0], [0, 1, 2, 3, 9], "offsets of shard feature 1 .* to 9: they must ascend"),
    "offsets that go back": ([0, 1, 0], [0, 3, 2, 3, 3], "offsets of shard feature 0"),
    "offsets that go back after rising past the ids": ([0, 1, 0], [0, 90, 2, 3, 3], "offsets of shard feature 0"),
    "negative offsets": ([0, 1, 0], [-2, 1, 2, 3, 3], "run from -2"),
    "offsets of no whole batch": ([0, 1, 0], [0, 1, 2, 3], r"got 4 offsets, expected 2 \* B \+ 1"),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("spec", [SGD, ROWWISE], ids=str)
@pytest.mark.parametrize("what", BAD)
def test_a_batch_that_would_leave_the_tables_is_refused(what: str, spec: OptimizerSpec, dtype: torch.dtype) -> None:
    ids, offsets, message = BAD[what]
    slots = [(5, 4), (3, 8), (0, 4)] if "without rows" in what else [(5, 4), (3, 8)]
    kernel = make(slots, list(range(len(slots))), spec)
    before = [weight.clone() for weight in kernel.weights()]
    batch = KernelInput(torch.tensor(ids, dtype=dtype), torch.tensor(offsets, dtype=dtype), None, [])
    for call in (kernel.forward, kernel.remember):
        with pytest.raises(ValueError, match=message):
            call(batch, True)
    assert all(torch.equal(one, other) for one, other in zip(before, kernel.weights(), strict=True))


def test_ids_that_are_overwritten_between_the_passes_are_refused() -> None:
    kernel = make([(5, 4)], [0], SGD)
    ids = torch.tensor([0, 1])
    out, saved = look_up(kernel, ids, torch.tensor([0, 1, 2]))
    ids[1] = 10**12
    with pytest.raises(ValueError, match="id 1000000000000 is not a row of table 't0'"):
        kernel.backward(saved, torch.ones_like(out))


@pytest.mark.parametrize("pooled", [True, False])
def test_tensors_of_the_wrong_shape_or_kind_are_refused(pooled: bool) -> None:
    kernel = make([(5, 4)], [0], SGD, pooled=pooled)
    ids, offsets = torch.tensor([0, 1, 4]), torch.tensor([0, 3])
    for bad in (ids.float(), ids.short(), ids[None]):
        with pytest.raises(ValueError, match=r"ids are .* they must be int32 or int64"):
            look_up(kernel, bad, offsets)
    with pytest.raises(ValueError, match=r"offsets are torch.float32"):
        look_up(kernel, ids, offsets.float())
    if pooled:
        with pytest.raises(ValueError, match=r"per-sample weights are \[2\].* expected \[3\]"):
            look_up(kernel, ids, offsets, torch.ones(2))
    out, saved = look_up(kernel, ids, offsets)
    for short in (out[..., :-1], out[None], out[:0]):
        with pytest.raises(ValueError, match=r"gradient .* does not match the lookup"):
            kernel.backward(saved, short)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.optimizer}-{spec.weight_decay}")
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16])
def test_memory_around_tables_and_batches_stays_as_it_is(spec: OptimizerSpec, data_type: DataType) -> None:
    """Tables, ids and gradients are views into larger tensors, whose rest holds what would be noticed."""
    torch.manual_seed(0)
    slots, features = [(7, 12), (0, 4), (5, 3)], [0, 1, 2, 0]
    lengths = torch.randint(0, 4, (4, 6)) * torch.tensor([1, 0, 1, 1])[:, None]
    ids = torch.cat(
        [torch.randint(0, max(1, slots[s][0]), (int(own.sum()),)) for s, own in zip(features, lengths, strict=True)]
    )
    offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
    spread = torch.full((2 * ids.numel() + 2,), 10**9)
    spread[1:-1:2] = ids
    kernel = make(slots, features, spec, data_type=data_type)
    rooms = []
    for number, weight in enumerate(kernel.weights()):
        room = torch.full((weight.numel() + 64,), torch.nan, dtype=weight.dtype)
        held = room[32 : 32 + weight.numel()].view(weight.shape)
        held.copy_(weight)
        kernel.weights()[number].set_(held)
        rooms.append(room)
    for _ in range(3):
        out, saved = look_up(kernel, spread[1:-1:2], offsets, torch.rand(ids.numel()))
        assert not out.isnan().any()
        wide = torch.full((6, 2 * out.shape[1]), torch.nan)
        wide[:, ::2] = torch.randn_like(out)
        kernel.backward(saved, wide[:, ::2])
    for room, weight in zip(rooms, kernel.weights(), strict=True):
        assert not weight.isnan().any()
        assert room[:32].isnan().all()
        assert room[32 + weight.numel() :].isnan().all()


def test_many_small_steps_of_a_frequent_row_are_not_rounded_away() -> None:
    """Each alone is less than half of the last digit of the weight; together they are not."""
    kernel = make([(5, 4)], [0], SGD)
    weight = kernel.weights()[0]
    weight.fill_(1.0)
    count = 4000
    _, saved = look_up(kernel, torch.full((count,), 2), torch.arange(count + 1))
    kernel.backward(saved, torch.full((count, 4), 1e-7))  # 1e-8 a step
    torch.testing.assert_close(weight[2], torch.full((4,), 1 - 4e-5), atol=1e-7, rtol=0)


def test_what_fails_on_a_thread_is_raised_where_it_was_asked_for() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    done = []
    with pytest.raises(ZeroDivisionError):
        threads.run_all(lambda task: task(), [(lambda: done.append(0),), (fail,), (lambda: done.append(2),)])
    assert sorted(done) == [0, 2]

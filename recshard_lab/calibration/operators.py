"""Times one rank's operators alone.

==================  ==============================  ==================================================================
operator            sizes                           work of one call
==================  ==============================  ==================================================================
launch              calls                           the host enqueues one kernel on one number
kernel              1                               the device runs it
read                1                               the host waits for the device and reads one number
copy                bytes                           reads and writes bytes of device memory, on a GPU
gather              ids, columns                    reads distinct random rows, fp32, and writes them
reread              ids, columns                    the same with few rows, each of them many times
lookup              ids, columns, ids a bag, rows   forward of the lookup kernel in use, random ids
train/OPTIMIZER     ids, columns, ids a bag, rows   the same with backward and the optimizer
index               ids, slots                      finds the slots of random ids in a dynamic table's index
dense, dense_tf32   batch, width                    forward and backward of two linear layers, in fp32 and in TF32
copy_to_device      bytes                           from pinned host memory
copy_to_host        bytes                           into pinned host memory
==================  ==============================  ==================================================================

All ranks run them at the same time, as in training. Lookups use the kernel that training uses: fbgemm's where it is
installed, otherwise the native one. `clock.py` has the method of timing.

Shape letters: B batch, N ids, d columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from recshard_lab.calibration.clock import Clock, TimedOperator
from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES

OPTIMIZERS = tuple(OPTIMIZER_STATE_BYTES)
CALLS = 256
BAG = 32
CPU_BATCHES = 8  # batches of a lookup, used in turn; equal ones would find their rows in the cache
PARAMETERS = 2  # matrices of a dense operator


@dataclass(frozen=True)
class Sizes:
    """Sizes of the operators on one kind of device.

    Attributes:
        table_bytes: of a table that no cache holds. few_bytes: of one that every cache holds.
        ids: of a lookup.
        hot_rows: of a lookup's table that a cache holds; 0: none.
        columns: of rows.
        batches, width: of dense layers.
        slots: of an index. copies: bytes.
    """

    table_bytes: int
    few_bytes: int
    ids: int
    hot_rows: int
    columns: tuple[int, ...]
    batches: tuple[int, ...]
    width: int
    slots: int
    copies: tuple[int, ...] = ()


CPU_SIZES = Sizes(64 << 20, 1 << 16, 1 << 12, 1 << 14, (16, 128), (32, 256), 512, 1 << 20)
GPU_SIZES = Sizes(
    1 << 31,
    1 << 18,
    1 << 20,
    0,
    (8, 16, 32, 64, 128, 256),
    (64, 256, 1024, 4096),
    1024,
    1 << 22,
    (1 << 16, 1 << 20, 1 << 24),
)


def time_operators(
    clock: Clock, optimizers: Sequence[str] = OPTIMIZERS, sizes: Sizes | None = None
) -> list[TimedOperator]:
    """Times all operators of the table above on this rank.

    Args:
        clock: of the rank's device.
        optimizers: for ``train``; a kernel is built for each.
        sizes: default: `CPU_SIZES` or `GPU_SIZES`.
    """
    sizes = sizes or (CPU_SIZES if clock.device.type == "cpu" else GPU_SIZES)
    return [
        *_launches(clock),
        *_gathers(clock, sizes),
        *_lookups(clock, optimizers, sizes),
        *_index(clock, sizes),
        *_dense(clock, sizes),
        *_copies(clock, sizes),
    ]


def on_rank() -> list[TimedOperator]:
    """`time_operators` on this rank's device."""
    return time_operators(_rank_clock())


def _rank_clock() -> Clock:
    from recshard_lab.comm import ShardingEnv, compute_device

    return Clock(compute_device(ShardingEnv.default()))


def kernels_on_rank() -> dict[str, list[str]]:
    """Optimizer -> the name of its lookup kernel, in a list, as a device profile keeps it."""
    clock = _rank_clock()
    return {optimizer: [_kernel(optimizer, BAG, 16, clock).name] for optimizer in OPTIMIZERS}


def slowest(by_rank: Sequence[Sequence[TimedOperator]]) -> list[TimedOperator]:
    """Of the same operators on all ranks, those of the slowest rank."""
    return [max(same, key=lambda one: one.ms) for same in zip(*by_rank, strict=True)]


def _launches(clock: Clock) -> Iterator[TimedOperator]:
    import torch

    number = torch.zeros(1, device=clock.device)

    def add() -> object:
        return number.add_(1)

    yield clock.time("launch", (CALLS,), add, CALLS)
    yield clock.time("kernel", (1,), add)
    yield clock.time("read", (1,), number.item, 1)


def _gathers(clock: Clock, sizes: Sizes) -> Iterator[TimedOperator]:
    import torch

    on_cpu = clock.device.type == "cpu"
    if not on_cpu:
        source, target = (torch.ones(sizes.table_bytes // 8, device=clock.device) for _ in range(2))
        yield clock.time("copy", (source.nbytes,), _call(target.copy_, source))
        del source, target
    for op, nbytes in (("gather", sizes.table_bytes), ("reread", sizes.few_bytes)):
        for cols in sizes.columns:
            rows = nbytes // (4 * cols)
            table = torch.ones(rows, cols, device=clock.device)  # of zeros, a CPU would store one page
            ids = _ids(rows, sizes.ids, clock, distinct=op == "gather")
            if on_cpu:
                out = torch.empty(len(ids), cols)
                run = _call(torch.index_select, table, 0, ids, out=out)
            else:  # index_select starts a block per row: 0.6 ns on an H200, whatever the row's bytes
                bags = torch.arange(len(ids), device=clock.device)
                run = _call(torch.nn.functional.embedding_bag, ids, table, bags, mode="sum")
            yield clock.time(op, (len(ids), cols), run)


def _lookups(clock: Clock, optimizers: Sequence[str], sizes: Sizes) -> Iterator[TimedOperator]:
    import torch

    tables = [(cols, sizes.table_bytes // (4 * cols)) for cols in sizes.columns]
    if sizes.hot_rows:
        tables.append((sizes.columns[-1], sizes.hot_rows))
    for optimizer in optimizers:
        for cols, rows in tables:
            kernel = _kernel(optimizer, rows, cols, clock)
            for stored in [*kernel.weights(), *(one for own in kernel.optimizer_states() for one in own.values())]:
                stored.fill_(0.01)  # as in training, every page of memory has been written
            batches = [
                _ids(rows, sizes.ids, clock, distinct=rows != sizes.hot_rows, seed=seed)
                for seed in range(1 if clock.device.type != "cpu" else CPU_BATCHES)
            ]
            offsets = torch.arange(0, len(batches[0]) + 1, BAG, device=clock.device)
            grad = torch.full((len(offsets) - 1, cols), 1e-3, device=clock.device)
            size = (len(batches[0]), cols, BAG, rows)
            if optimizer == optimizers[0]:
                yield clock.time("lookup", size, _lookup(kernel, batches, offsets, None))
            yield clock.time(f"train/{optimizer}", size, _lookup(kernel, batches, offsets, grad))


def _kernel(optimizer: str, rows: int, cols: int, clock: Clock) -> Any:
    """The lookup kernel that training uses on this device, with one table."""
    import torch

    from recshard_lab.embedding.configs import DataType
    from recshard_lab.embedding.kernels import KernelSpec, ShardSpec, choose_kernel
    from recshard_lab.embedding.optimizers import EmbOptimType, OptimizerSpec

    shards = [ShardSpec("calibrate", rows, cols, DataType.FP32, cols)]
    spec = KernelSpec(shards, [0], OptimizerSpec(EmbOptimType(optimizer)), device=torch.device(clock.device))
    return choose_kernel(spec)(spec)


def _lookup(kernel: Any, batches: Sequence[Any], offsets: Any, grad: Any) -> Callable[[], object]:
    """Forward on one batch after the other, with backward if there is a gradient."""
    from recshard_lab.embedding.kernels import KernelInput

    turns = cycle([KernelInput(ids, offsets, None, [len(ids)]) for ids in batches])

    def run() -> object:
        _, saved = kernel.forward(next(turns), grad is not None)
        return None if grad is None else kernel.backward(saved, grad)

    return run


def _index(clock: Clock, sizes: Sizes) -> Iterator[TimedOperator]:
    """A step of an index that is 70% full, whose ids are all present."""
    import torch

    from recshard_lab.embedding.dynamic.index import ScoredIndex

    index = ScoredIndex(sizes.slots, device=clock.device)
    present = torch.arange(int(0.7 * sizes.slots), device=clock.device) * 7919
    for some in present.split(1 << 16):
        index.find_or_insert(some)
    for count in (sizes.ids // 8, sizes.ids):
        many = CPU_BATCHES if clock.device.type == "cpu" else 1
        turns = cycle([present[_ids(len(present), count, clock, distinct=False, seed=seed)] for seed in range(many)])
        yield clock.time("index", (count, sizes.slots), lambda turns=turns: index.find_or_insert(next(turns)))  # type: ignore[misc]


def _dense(clock: Clock, sizes: Sizes) -> Iterator[TimedOperator]:
    import torch
    from torch import nn

    layers = [nn.Linear(sizes.width, sizes.width, bias=False, device=clock.device) for _ in range(PARAMETERS)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1])

    def run(values: torch.Tensor) -> None:
        model(values).sum().backward()

    was = torch.get_float32_matmul_precision()
    kinds = {"dense": "highest"} | ({"dense_tf32": "high"} if clock.device.type != "cpu" else {})
    try:
        for op, precision in kinds.items():
            torch.set_float32_matmul_precision(precision)
            for batch in sizes.batches:
                values = torch.ones(batch, sizes.width, device=clock.device, requires_grad=True)
                yield clock.time(op, (batch, sizes.width), _call(run, values))
    finally:
        torch.set_float32_matmul_precision(was)


def _copies(clock: Clock, sizes: Sizes) -> Iterator[TimedOperator]:
    import torch

    for nbytes in sizes.copies:
        host = torch.zeros(nbytes // 4).pin_memory()
        there = torch.zeros(nbytes // 4, device=clock.device)
        yield clock.time("copy_to_device", (nbytes,), _call(there.copy_, host, non_blocking=True))
        yield clock.time("copy_to_host", (nbytes,), _call(host.copy_, there, non_blocking=True))


def _ids(rows: int, count: int, clock: Clock, *, distinct: bool, seed: int = 0) -> Any:
    """``count`` random rows; distinct ones at most a quarter of the rows, a multiple of `BAG`."""
    import torch

    rng = np.random.default_rng([rows, seed])
    if distinct:
        count = min(count, rows // 4) // BAG * BAG
        ids = rng.permutation(np.unique(rng.integers(0, rows, 2 * count)))[:count]
    else:
        ids = rng.integers(0, rows, count)
    return torch.from_numpy(ids).to(clock.device)


def _call(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], object]:
    return lambda: fn(*args, **options)

"""Lookups, their backward with the optimizer, and a one-process step: kernel by kernel, optimizer, ids, threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from benchmarks import Figure, torch_threads
from recshard_lab.embedding import (
    DataType,
    EmbeddingBagConfig,
    EmbOptimType,
    FusedEmbeddingBagCollection,
    OptimizerSpec,
)
from recshard_lab.embedding.kernels import KernelInput, KernelSpec, ShardSpec, available, kernel_named
from recshard_lab.sparse import KeyedJaggedTensor

ROWS, DIM, POOLING, ZIPF = 100_000, 64, 10, 1.2
TABLES, BATCH = 4, 2048  # of the kernels alone
STEP_TABLES, STEP_BATCH = 26, 4096  # of a whole step
ROUNDS, STEP_ROUNDS = 15, 9
OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD)
SHORT = {"exact_sgd": "SGD", "exact_row_wise_adagrad": "row-wise Adagrad", "exact_adagrad": "Adagrad"}


def figures() -> list[Figure]:
    """Times are medians of rounds in which every kernel has its turn, one after the other."""
    return [*_kernel_figures(), *_step_figures()]


# ---- the kernels alone ----


def _kernel_figures() -> Iterator[Figure]:
    shards = [ShardSpec(f"t{number}", ROWS, DIM, DataType.FP32, DIM) for number in range(TABLES)]
    offsets = torch.arange(0, TABLES * BATCH * POOLING + 1, POOLING)
    grad = torch.randn(BATCH, TABLES * DIM)
    for optimizer in OPTIMIZERS:
        spec = KernelSpec(shards, list(range(TABLES)), OptimizerSpec(optimizer, 0.01))
        kernels = {name: kernel_named(name)(spec) for name in available()}
        for kind, draw in (("uniform", uniform_ids), ("Zipf", zipf_ids)):
            counts = [BATCH * POOLING] * TABLES
            batches = [KernelInput(draw(TABLES, BATCH), offsets, None, counts) for _ in range(3)]
            for threads in _thread_counts():
                forward: dict[str, list[float]] = {name: [] for name in kernels}
                backward: dict[str, list[float]] = {name: [] for name in kernels}
                with torch_threads(threads):
                    for turn in range(ROUNDS + 2):
                        for name, kernel in kernels.items():
                            begun = time.perf_counter()
                            _, saved = kernel.forward(batches[turn % 3], True)
                            between = time.perf_counter()
                            kernel.backward(saved, grad)
                            forward[name].append(between - begun)
                            backward[name].append(time.perf_counter() - between)
                label = f"{kind} ids, {threads} thread{'s' if threads > 1 else ''}"
                if optimizer is OPTIMIZERS[0]:
                    yield from _times(f"forward, {label}", forward)
                yield from _times(f"backward and {SHORT[str(optimizer)]}, {label}", backward)


def _times(label: str, taken: Mapping[str, list[float]]) -> Iterator[Figure]:
    for name, times in taken.items():
        yield Figure(f"{label}: {name}", 1e3 * median(times[2:]), "ms")


# ---- a whole step ----


def _step_figures() -> Iterator[Figure]:
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{i}"])
        for i in range(STEP_TABLES)
    ]
    lengths = torch.full((STEP_TABLES * STEP_BATCH,), POOLING)
    keys = [f"f{i}" for i in range(STEP_TABLES)]
    grad = torch.randn(STEP_BATCH, STEP_TABLES * DIM)
    peer = "fbgemm" if "fbgemm" in available() else "native"
    for optimizer in OPTIMIZERS[:2]:
        collections = {
            "chosen": FusedEmbeddingBagCollection(tables, optimizer, {"lr": 0.01}),
            peer: FusedEmbeddingBagCollection(tables, optimizer, {"lr": 0.01}, backend=peer),
        }
        for kind, draw in (("uniform", uniform_ids), ("Zipf", zipf_ids)):
            batches = [KeyedJaggedTensor(keys, draw(STEP_TABLES, STEP_BATCH), lengths=lengths) for _ in range(3)]
            for threads in _thread_counts():
                with torch_threads(threads):
                    taken = _in_turns({name: _steps(own, batches, grad) for name, own in collections.items()})
                what = f"step of {STEP_TABLES} tables, {SHORT[str(optimizer)]}, {kind} ids, {threads} threads"
                chosen, other = median(taken["chosen"]), median(taken[peer])
                yield Figure(f"{what}: {collections['chosen'].backend}", 1e3 * chosen, "ms")
                yield Figure(f"{what}: {peer}", 1e3 * other, "ms")
                target = (1.2 if threads == 1 else 2.0) if kind == "uniform" else None
                yield Figure(f"{what}: ratio", other / chosen, "x", target=target, at_most=False)


def _steps(
    collection: FusedEmbeddingBagCollection, batches: Sequence[KeyedJaggedTensor], grad: Tensor
) -> Callable[[int], None]:
    def step(turn: int) -> None:
        collection(batches[turn % len(batches)]).values().backward(grad)

    return step


def _in_turns(actions: Mapping[str, Callable[[int], None]]) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(-2, STEP_ROUNDS):
        for name, action in actions.items():
            begun = time.perf_counter()
            action(turn)
            if turn >= 0:
                taken[name].append(time.perf_counter() - begun)
    return taken


# ---- ids, threads ----


def uniform_ids(tables: int, batch: int) -> Tensor:
    return torch.randint(0, ROWS, (tables * batch * POOLING,))


def zipf_ids(tables: int, batch: int) -> Tensor:
    """Frequent rows are spread over their table, as they are with hashed ids."""
    ends = torch.arange(1, ROWS + 1, dtype=torch.float64).pow(-ZIPF).cumsum(0)
    ranks = torch.searchsorted(ends, torch.rand(tables, batch * POOLING, dtype=torch.float64) * ends[-1])
    return torch.stack([torch.randperm(ROWS)[own.clamp(max=ROWS - 1)] for own in ranks]).flatten()


def _thread_counts() -> list[int]:
    return [1] if torch.get_num_threads() == 1 else [1, 2]

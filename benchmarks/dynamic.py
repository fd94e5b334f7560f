"""Dynamic tables: ids found and inserted a second, load at the first eviction, a training step, AUC under churn.

The index has 4 M slots at load factor 0.9. A step looks up 26 tables of 100,000 rows x 64, batch 4096, pooling 10, and
steps SGD in backward. All ids of a dynamic table have rows when the step is timed. `benchmarks.apparatus.churn` says
how the AUC is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import Figure, torch_threads
from benchmarks.apparatus.churn import BEST, churn_figures
from benchmarks.lookup import uniform_ids, zipf_ids
from recshard_lab.embedding import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingConfig,
    EmbeddingBagConfig,
    FusedEmbeddingBagCollection,
)
from recshard_lab.embedding.dynamic import ScoredIndex
from recshard_lab.sparse import KeyedJaggedTensor

SLOTS, LOAD, DIM = 1 << 22, 0.9, 64
THREADS = 2
ROUNDS = 7
TABLES, ROWS, BATCH, POOLING = 26, 100_000, 4096, 10
FILLED = (1 << 17, 1 << 20)
"""Sizes at which the load at the first eviction is measured."""

_FIND, _INSERT = f"find, {SLOTS:,} slots, {THREADS} threads", f"find_or_insert, 10% new ids, {THREADS} threads"


def _first(slots: int, choices: int) -> str:
    """
    >>> _first(1024, 2)
    'load at the first eviction, 1,024 slots, 2 buckets an id'
    """
    return f"load at the first eviction, {slots:,} slots, {choices} bucket{'s' if choices > 1 else ''} an id"


def _ratio(kind: str) -> str:
    """
    >>> _ratio("uniform")
    'training step over a static table, uniform ids'
    """
    return f"training step over a static table, {kind} ids"


TARGETS = {
    _FIND: 30e6,
    _INSERT: 10e6,
    **{_first(slots, 1): 0.75 for slots in FILLED},
    **{_first(slots, 2): 0.95 for slots in FILLED},
    **{_ratio(kind): 1.5 for kind in ("uniform", "Zipf")},
    BEST: 0.002,
}


def figures(only: Sequence[str] = ()) -> list[Figure]:
    """The index, then filling one, then a step, then the AUC under churn.

    Args:
        only: some of ``"index"``, ``"filling"``, ``"step"`` and ``"churn"``. Default: all.

    Raises:
        ValueError: another name.
    """
    groups = {
        "index": (THREADS, _index_figures),
        "filling": (THREADS, _first_evictions),
        "step": (THREADS, _step_figures),
        "churn": (1, churn_figures),  # one thread: sums have one order
    }
    for name in only:
        if name not in groups:
            raise ValueError(f"only={name!r} is not a group of figures. Fix: use some of {', '.join(groups)}")
    found: list[Figure] = []
    for name, (threads, measure) in groups.items():
        if not only or name in only:
            torch.manual_seed(0)
            with torch_threads(threads):
                found += measure()
    return found


def _random_ids(count: int) -> Tensor:
    return torch.randint(-(1 << 62), 1 << 62, (count,))


def _rate(action: Callable[[], object], count: int) -> float:
    """Ids a second, of the median of `ROUNDS`."""
    taken = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begun)
    return count / median(taken)


def _index_figures() -> Iterator[Figure]:
    index = ScoredIndex(SLOTS, evict="lfu")
    present = _random_ids(int(LOAD * SLOTS))
    index.find_or_insert(present)
    weight = torch.randn(SLOTS, DIM)
    batch = present[torch.randint(0, len(present), (SLOTS,))]
    yield Figure(_FIND, _rate(lambda: index.find(batch), len(batch)), "ids/s", at_most=False)
    some = batch[: SLOTS // 4]
    rows = torch.empty(len(some), DIM)
    rate = _rate(lambda: torch.index_select(weight, 0, index.find(some), out=rows), len(some))
    yield Figure(f"find and read rows of {DIM} columns, {THREADS} threads", rate, "ids/s", at_most=False)
    absent = _random_ids(len(some))
    rate = _rate(lambda: index.find(absent), len(absent))
    yield Figure(f"find absent ids, {THREADS} threads", rate, "ids/s", at_most=False)
    rate = _rate(lambda: index.find_or_insert(batch), len(batch))
    yield Figure(f"find_or_insert, no new ids, {THREADS} threads", rate, "ids/s", at_most=False)
    tenth = len(some) // 10

    def with_new_ids() -> None:
        new = _random_ids(tenth)
        index.find_or_insert(torch.cat([some[tenth:], new]))
        index.erase(new)

    def new_ids_alone() -> None:
        index.erase(_random_ids(tenth))

    both, alone = _rate(with_new_ids, len(some)), _rate(new_ids_alone, len(some))
    yield Figure(_INSERT, 1 / (1 / both - 1 / alone), "ids/s", at_most=False, note="Without the time to erase them.")


def _first_evictions() -> Iterator[Figure]:
    for choices in (1, 2):
        for slots in FILLED:
            index = ScoredIndex(slots, choices=choices)
            while not index.counters.evictions:
                index.find_or_insert(_random_ids(slots // 1000))
            yield Figure(_first(slots, choices), index.load_factor, "", at_most=False)


def _step_figures() -> Iterator[Figure]:
    names = [f"f{i}" for i in range(TABLES)]
    optimizer: Any = torch.optim.SGD, {"lr": 0.01}
    static = FusedEmbeddingBagCollection(
        [EmbeddingBagConfig(ROWS, DIM, f"t{i}", feature_names=[name]) for i, name in enumerate(names)], *optimizer
    )
    dynamic = DynamicEmbeddingBagCollection(
        [DynamicEmbeddingConfig(f"t{i}", DIM, int(ROWS / LOAD), feature_names=[name]) for i, name in enumerate(names)],
        *optimizer,
    )
    for ids in torch.arange(ROWS).split(ROWS // 4):
        lengths = torch.ones(TABLES * len(ids), dtype=torch.int64)
        dynamic(KeyedJaggedTensor(names, ids.repeat(TABLES), lengths=lengths))
    lengths = torch.full((TABLES * BATCH,), POOLING)
    grad = torch.randn(BATCH, TABLES * DIM)
    for kind, draw in (("uniform", uniform_ids), ("Zipf", zipf_ids)):
        batches = [KeyedJaggedTensor(names, draw(TABLES, BATCH), lengths=lengths) for _ in range(3)]
        taken: dict[str, list[float]] = {"static": [], "dynamic": []}
        for turn in range(-2, ROUNDS):
            for name, collection in (("static", static), ("dynamic", dynamic)):
                begun = time.perf_counter()
                collection(batches[turn % 3]).values().backward(grad)
                if turn >= 0:
                    taken[name].append(time.perf_counter() - begun)
        middle = {name: 1e3 * median(times) for name, times in taken.items()}
        yield Figure(
            _ratio(kind), middle["dynamic"] / middle["static"], "x", beside={f"{n} ms": t for n, t in middle.items()}
        )

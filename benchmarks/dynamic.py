"""Dynamic tables: ids found and inserted a second, load at the first eviction, a training step, AUC under churn.

Of static tables: a training step with cached rows, see `benchmarks.apparatus.cached_step`. The speed and size of dumps
are those of `benchmarks.apparatus.dumps`, the times of slower tiers those of `benchmarks.apparatus.tiers`.

The index has 4 M slots at load factor 0.9. A step looks up 26 tables of 100,000 rows x 64, batch 4096, pooling 10, and
steps SGD in backward. All ids of a dynamic table have rows when the step is timed. `benchmarks.apparatus.churn` says
how the AUC is measured.

Rates depend on the machine. They are therefore shown beside those of `TorchProbe`, which runs in turn with the index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import Figure, torch_threads
from benchmarks.apparatus.cached_step import CACHED, cached_figures
from benchmarks.apparatus.churn import BEST, churn_figures
from benchmarks.apparatus.dumps import dump_figures
from benchmarks.apparatus.tiers import tier_figures
from benchmarks.lookup import uniform_ids, zipf_ids
from recshard_lab.embedding import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingConfig,
    EmbeddingBagConfig,
    FusedEmbeddingBagCollection,
)
from recshard_lab.embedding.dynamic import ScoredIndex
from recshard_lab.embedding.dynamic.config import SLOTS as BUCKET
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
    CACHED: 1.2,
    BEST: 0.002,
}


def figures(only: Sequence[str] = ()) -> list[Figure]:
    """The index, then filling one, then a step, then one of cached tables, then the AUC under churn, dumps, tiers.

    Args:
        only: some of ``"index"``, ``"filling"``, ``"step"``, ``"cached"``, ``"churn"``, ``"dumps"`` and ``"tiers"``.
            Default: all.

    Raises:
        ValueError: another name.
    """
    groups = {
        "index": (THREADS, _index_figures),
        "filling": (THREADS, _first_evictions),
        "step": (THREADS, _step_figures),
        "cached": (1, cached_figures),  # one thread a rank; another one prefetches
        "churn": (1, churn_figures),  # one thread: sums have one order
        "dumps": (1, dump_figures),  # one thread a rank
        "tiers": (1, tier_figures),
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


class TorchProbe:
    """The reference: double hashing in vectorised torch operators, without scores. Ids are not -1.

    >>> probe = TorchProbe(8)
    >>> bool((probe.find(torch.tensor([5, 6]), insert=True) == probe.find(torch.tensor([5, 6]))).all())
    True
    """

    def __init__(self, slots: int) -> None:
        self.keys, self.mask = torch.full((slots,), -1), slots - 1

    def find(self, ids: Tensor, insert: bool = False) -> Tensor:
        """``[N]`` slots; -1 for absent ids, which are inserted if ``insert``."""
        out, left = torch.full_like(ids, -1), torch.arange(len(ids))
        mixed = ids * -0x61C8864680B583EB
        mixed ^= (mixed >> 32) & 0xFFFFFFFF
        slots, steps = mixed & self.mask, (mixed >> 40) & self.mask | 1
        while len(left):
            held = self.keys[slots]
            if insert:
                empty = held == -1
                self.keys[slots[empty]] = ids[empty]
                held = self.keys[slots]
            found = held == ids
            out[left[found]] = slots[found]
            on = (~found & (held != -1)).nonzero().squeeze(1)
            left, ids, steps = left[on], ids[on], steps[on]
            slots = (slots[on] + steps) & self.mask
        return out

    def erase(self, ids: Tensor) -> None:
        """Of the ids that were inserted last only: chains through others would break."""
        self.keys[self.find(ids)] = -1


def _rates(count: int, *actions: Callable[[], object]) -> list[float]:
    """Ids a second of each action, of the median of `ROUNDS`. They take turns."""
    taken: list[list[float]] = [[] for _ in actions]
    for _ in range(ROUNDS):
        for action, own in zip(actions, taken, strict=True):
            begun = time.perf_counter()
            action()
            own.append(time.perf_counter() - begun)
    return [count / median(own) for own in taken]


def _index_figures() -> Iterator[Figure]:
    index, probe = ScoredIndex(SLOTS, evict="lfu"), TorchProbe(SLOTS)
    present = _random_ids(int(LOAD * SLOTS))
    index.find_or_insert(present)
    probe.find(present, insert=True)
    weight = torch.randn(SLOTS, DIM)
    batch = present[torch.randint(0, len(present), (SLOTS,))]
    some = batch[: SLOTS // 4]
    rows, absent, tenth = torch.empty(len(some), DIM), _random_ids(len(some)), len(some) // 10

    def figure(name: str, own: float, reference: float) -> Figure:
        beside = {"torch ids/s": reference, "over torch": own / reference}
        return Figure(name, own, "ids/s", at_most=False, beside=beside)

    yield figure(_FIND, *_rates(len(batch), lambda: index.find(batch), lambda: probe.find(batch)))
    reading = [lambda find=each.find: torch.index_select(weight, 0, find(some), out=rows) for each in (index, probe)]
    yield figure(f"find and read rows of {DIM} columns, {THREADS} threads", *_rates(len(some), *reading))
    rates = _rates(len(absent), lambda: index.find(absent), lambda: probe.find(absent))
    yield figure(f"find absent ids, {THREADS} threads", *rates)
    rates = _rates(len(batch), lambda: index.find_or_insert(batch), lambda: probe.find(batch, insert=True))
    yield figure(f"find_or_insert, no new ids, {THREADS} threads", *rates)
    new = [torch.cat([some[tenth:], _random_ids(tenth)]) for _ in range(2)]
    taken: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        index.find_or_insert(new[0])
        between = time.perf_counter()
        probe.find(new[1], insert=True)
        taken[0].append(between - begun)
        taken[1].append(time.perf_counter() - between)
        index.erase(new[0][-tenth:])
        probe.erase(new[1][-tenth:])
    yield figure(_INSERT, *(len(some) / median(own) for own in taken))


def _expected(slots: int) -> float:
    """The expected load at the first eviction, with one bucket an id and a random hash.

    With ``m`` ids a bucket on average, the ids of each bucket follow a Poisson distribution. The integral of the
    probability that none has more than 128 is the expected ``m``. No hash that is independent of the ids does better:
    uneven buckets overflow earlier.

    >>> round(_expected(1 << 17), 3), round(_expected(1 << 20), 3)
    (0.745, 0.705)
    """
    mean = torch.arange(0.005, 2 * BUCKET, 0.01, dtype=torch.float64)
    fits = torch.special.gammaincc(torch.tensor(BUCKET + 1.0, dtype=torch.float64), mean)
    return float((fits ** (slots // BUCKET)).sum() * 0.01 / BUCKET)


def _first_evictions() -> Iterator[Figure]:
    for choices in (1, 2):
        for slots in FILLED:
            index = ScoredIndex(slots, choices=choices)
            while not index.counters.evictions:
                index.find_or_insert(_random_ids(slots // 1000))
            beside = {"expected": _expected(slots)} if choices == 1 else {}
            yield Figure(_first(slots, choices), index.load_factor, "", at_most=False, beside=beside)


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

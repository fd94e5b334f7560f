"""The rules of `ScoredIndex` over Python dictionaries, one id at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SLOTS, SPARE = 128, 16
_M64 = (1 << 64) - 1


def hashes(key: int) -> tuple[int, int]:
    h = key & _M64
    for _ in range(2):
        h = ((h ^ (h >> 32)) * 0xD6E8FEB86659FD93) & _M64
    h ^= h >> 32
    return h, (h * 0x9E3779B97F4A7C15) & _M64


@dataclass
class ReferenceIndex:
    """Buckets as dictionaries: id -> [score, step of the last access]."""

    partitions: int
    buckets: int
    evict: str
    choices: int
    step: int = 0
    epoch: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    held: dict[int, dict[int, list[int]]] = field(default_factory=dict)

    def buckets_of(self, key: int) -> list[int]:
        h, g = hashes(key)
        first = (((h >> 32) * self.partitions) >> 32) * self.buckets
        both = [first + (((h & 0xFFFFFFFF) * self.buckets) >> 32), first + (((g >> 32) * self.buckets) >> 32)]
        return both[: self.choices]

    def entry(self, key: int) -> list[int] | None:
        return next((self.held[b][key] for b in self.buckets_of(key) if key in self.held.get(b, {})), None)

    def ids(self) -> dict[int, int]:
        """Id -> score."""
        return {key: score for bucket in self.held.values() for key, (score, _) in bucket.items()}

    def _accessed(self, score: int, times: int, given: int | None) -> int:
        match self.evict:
            case "lru":
                return self.step
            case "lfu":
                return score + times
            case "epoch_lru":
                return (self.epoch << 32) | self.step
            case "epoch_lfu":
                return (self.epoch << 32) | min((score & 0xFFFFFFFF) + times, 0xFFFFFFFF)
            case _:
                assert given is not None
                return given

    def find_or_insert(
        self,
        ids: Sequence[int],
        scores: Sequence[int] | None = None,
        admit: Callable[[int, int], bool] = lambda key, times: True,
        pinned_from: int | None = None,
    ) -> list[int]:
        """The ids that were evicted."""
        self.step += 1
        pinned = self.step if pinned_from is None else min(pinned_from, self.step)
        times = Counter(ids)
        given: dict[int, int] = {}
        for key, score in zip(ids, scores or (), strict=False):
            given[key] = max(given.get(key, score), score)
        new = []
        self.counters["lookups"] += len(ids)
        for key in sorted(times):
            entry = self.entry(key)
            self.counters["hits" if entry else "misses"] += times[key]
            if entry is None:
                new.append(key)
            else:
                entry[:] = [self._accessed(entry[0], times[key], given.get(key)), self.step]
        evicted = []
        for key in new:
            if not admit(key, times[key]):
                self.counters["refusals"] += 1
                continue
            both = self.buckets_of(key)
            free = [SLOTS - len(self.held.get(b, {})) for b in both]
            chosen = both[0]
            if len(both) > 1 and free[0] <= SPARE and free[1] > free[0]:
                chosen = both[1]
            if max(free) == 0:
                victims = [
                    (score, touched, old, b)
                    for b in set(both)
                    for old, (score, touched) in self.held[b].items()
                    if touched < pinned
                ]
                if not victims:
                    self.counters["overflows"] += 1
                    continue
                *_, old, chosen = min(victims)
                del self.held[chosen][old]
                self.counters["evictions"] += 1
                evicted.append(old)
            self.held.setdefault(chosen, {})[key] = [self._accessed(0, times[key], given.get(key)), self.step]
            self.counters["inserts"] += 1
        return evicted

    def erase(self, ids: Sequence[int]) -> None:
        for key in set(ids):
            for bucket in self.buckets_of(key):
                if self.held.get(bucket, {}).pop(key, None) is not None:
                    self.counters["erasures"] += 1

"""Counters of a model on the ranks: the samples that `watch` posts on every rank, combined in the kernel.

>>> tables = {"movie": {"lookups": {"hbm": 3, "ddr": 1}, "rows": 10, "states": {}}}
>>> Sample.of([{"step": 2, "ms": 0.1, "tables": tables}] * 2).table("movie").fast_share
0.75
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from recshard_lab.lab.live.watch import BOARD

_RANK_SIDE = "__import__('recshard_lab.lab.live.watch', fromlist=['watch'])"


@dataclass(frozen=True, eq=False)
class TableCounters:
    """One table's counters on all ranks, or on one.

    Args:
        name: the table.
        parts: the report of each of these ranks.
        alone: whether this is one rank; its norms then include replicas.
    """

    name: str
    parts: tuple[Mapping[str, Any], ...]
    alone: bool = False

    @property
    def _squares(self) -> str:
        return "held_squares" if self.alone else "squares"

    @cached_property
    def _sums(self) -> dict[str, Any]:
        """The ranks' reports added up, once."""
        sums: dict[str, Any] = {"tiers": set(), "lookups": {}, "counted": {}, "cache": {}, "a_step": {}, "states": {}}
        sums["steps"] = None
        sums |= dict.fromkeys(("touched_rows", "rows_here", "out_of_range", "squares"), 0)
        for part in self.parts:
            sums["tiers"].update(part.get("tiers", ()))
            for name in ("lookups", "counted", "cache", "a_step"):
                _add(sums[name], part.get(name, {}))
            for name, state in part.get("states", {}).items():
                _add(sums["states"].setdefault(name, {}), state)
            for name in ("touched_rows", "rows_here", "out_of_range"):
                sums[name] += part.get(name, 0)
            sums["squares"] += part.get("weights", {}).get(self._squares, 0.0)
            if "steps" in part:
                sums["steps"] = max(sums["steps"] or 0, part["steps"])
        return sums

    @property
    def rows(self) -> int:
        """Rows E of the table."""
        return max((int(part.get("rows", 0)) for part in self.parts), default=0)

    def lookups(self, *kinds: str) -> int:
        """Ids looked up since watching began: in the rank's memory ("hbm"), the host's ("ddr"), or the rank's replica
        of replicated rows ("replica"). Without a kind, the sum."""
        return sum(count for kind, count in self._sums["lookups"].items() if not kinds or kind in kinds)

    @property
    def fast_share(self) -> float | None:
        """Share of the lookups outside the host's memory; None if no row is stored there."""
        slow = self.lookups("ddr")
        if not slow and "ddr" not in self._sums["tiers"]:
            return None
        return _share(self.lookups() - slow, self.lookups())

    @property
    def touched_share(self) -> float | None:
        """Share of the stored rows (replicas counted) that were looked up since watching began."""
        return _share(self._sums["touched_rows"], self._sums["rows_here"])

    def cache(self, name: str) -> int | None:
        """ "hits", "misses", "evictions", "capacity" or "held" of the simulated cache; None without one."""
        found: int | None = self._sums["cache"].get(name)
        return found

    @property
    def counted(self) -> dict[str, float]:
        """The kernels' own counters, summed over ranks."""
        return dict(self._sums["counted"])

    @property
    def hit_share(self) -> float | None:
        """Hit rate of the kernel's cache if it has one, else of the simulated cache."""
        own = self._sums["counted"]
        if "hits" not in own or "misses" not in own:
            own = self._sums["cache"]
        return _share(own["hits"], own["hits"] + own["misses"]) if "hits" in own else None

    @property
    def evictions(self) -> float | None:
        """Rows evicted from the kernel's cache if it has one, else from the simulated cache."""
        return self.counted.get("evictions", self.cache("evictions"))

    def a_step(self, *names: str) -> float | None:
        """The kernels' counter of the first of these names that exists, per step between the last two samples of each
        rank, summed over ranks. None before the second sample, or without such a counter."""
        rates: dict[str, float] = self._sums["a_step"]
        return next((rates[name] for name in names if name in rates), None)

    @property
    def slots(self) -> float | None:
        """Slots of a dynamic table or of a cache. None for other tables."""
        return self.counted.get("slots")

    @property
    def load_factor(self) -> float | None:
        """Share of the slots of a dynamic table or of a cache that are in use. None for other tables."""
        return _share(self.counted["slots_in_use"], self.counted["slots"]) if self.slots else None

    @property
    def weight_norm(self) -> float:
        """Norm of all weights: of the table without replicas, of one rank with them."""
        return float(self._sums["squares"] ** 0.5)

    @property
    def state_names(self) -> list[str]:
        """The optimizer's states with one number per weight or per row."""
        return list(self._sums["states"])

    def state(self, what: str, name: str | None = None) -> float:
        """ "bytes" (replicas counted), sum of "squares", or number of nonzero "rows", of one state or of all."""
        chosen = [name] if name is not None else self.state_names
        return float(sum(self._sums["states"][one][what] for one in chosen))

    @property
    def state_norm(self) -> float | None:
        """As `weight_norm`, of all states together; None if the optimizer has none."""
        return self.state(self._squares) ** 0.5 if self.state_names else None

    @property
    def steps(self) -> int | None:
        """Steps counted by the optimizer (such as Adam); None if it counts none."""
        found: int | None = self._sums["steps"]
        return found

    @property
    def out_of_range(self) -> int:
        """Out-of-range ids in the ranks' batches."""
        return int(self._sums["out_of_range"])


def _add(sums: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0) + value


@dataclass(frozen=True, eq=False)
class Sample:
    """The reports of all ranks, each taken between two steps.

    Args:
        step: the lowest step of all ranks.
        ranks: the report of each rank.
    """

    step: int
    ranks: tuple[Mapping[str, Any], ...]
    _tables: dict[tuple[str, int | None], TableCounters] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, posted: Sequence[Mapping[str, Any]]) -> Sample:
        """From the ranks' boards."""
        return cls(min(int(one["step"]) for one in posted), tuple(posted))

    def same_as(self, other: Sample) -> bool:
        """Whether both have the same report of every rank."""
        return [one["number"] for one in self.ranks] == [one["number"] for one in other.ranks]

    @property
    def names(self) -> list[str]:
        """The tables."""
        return list({name: None for one in self.ranks for name in one["tables"]})

    def table(self, name: str, rank: int | None = None) -> TableCounters:
        """A table's counters on all ranks, or on one."""
        if (name, rank) not in self._tables:
            chosen = self.ranks if rank is None else [self.ranks[rank]]
            parts = tuple(one["tables"][name] for one in chosen if name in one["tables"])
            self._tables[name, rank] = TableCounters(name, parts, rank is not None)
        return self._tables[name, rank]

    def totals(self) -> dict[str, int]:
        """Table -> its lookups on all ranks, most first."""
        found: dict[str, int] = {}
        for one in self.ranks:
            for name, part in one["tables"].items():
                found[name] = found.get(name, 0) + sum(part["lookups"].values())
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    def sums(self, table: str | None = None) -> dict[str, float]:
        """Over all tables (or one) and ranks: ``state_bytes``. Of hypothetical caches ``hits``, ``misses``, ``held``
        rows and ``capacity``. Of caches and dynamic tables ``own_hits``, ``own_misses`` and ``slots``."""
        names = ("state_bytes", "hits", "misses", "held", "capacity", "own_hits", "own_misses", "slots")
        found = dict.fromkeys(names, 0.0)
        for part in (each for one in self.ranks for name, each in one["tables"].items() if table in (None, name)):
            found["state_bytes"] += sum(state["bytes"] for state in part["states"].values())
            for name, count in part.get("cache", {}).items():
                if name in found:
                    found[name] += count
            own = part.get("counted", {})
            if "slots" in own:
                found["own_hits"] += own["hits"]
                found["own_misses"] += own["misses"]
                found["slots"] += own["slots"]
        return found

    @property
    def ms(self) -> float:
        """Time that the slowest rank needed for it."""
        return max(float(one["ms"]) for one in self.ranks)


def watch_counters(ranks: Any, model: str = "model", *, every_s: float = 0.5, cache_rows: int = 0) -> Sample:
    """Starts watching a model on the ranks, instead of one watched before. The ranks must be idle.

    Args:
        ranks: the launched session.
        model: name of a `DistributedModelParallel` on the ranks.
        every_s: minimum seconds between two samples while a cell runs; another sample follows every cell.
        cache_rows: simulates a cache of this many rows per table and rank; 0 simulates none.

    Returns:
        The first sample; `read_counters` returns the newest at any time.

    Raises:
        RankError: the ranks have no model of this name.
        ValueError: `every_s` or `cache_rows` is negative or not a number.
    """
    if not isinstance(every_s, (int, float)) or isinstance(every_s, bool) or not 0 <= every_s < float("inf"):
        raise ValueError(f"every_s must be seconds, not negative, got {every_s!r}")
    if not isinstance(cache_rows, int) or isinstance(cache_rows, bool) or cache_rows < 0:
        raise ValueError(f"cache_rows must be a number of rows, 0 for no cache, got {cache_rows!r}")
    if not isinstance(model, str):
        raise ValueError(f"model must be the model's name on the ranks, as text, got {model!r:.60}")
    _session(ranks)
    return Sample.of(ranks.eval(f"{_RANK_SIDE}.start({model}, {float(every_s)!r}, {cache_rows})"))


def read_counters(ranks: Any) -> Sample | None:
    """The newest sample of every rank, at any time, also while they compute; None if no model is watched."""
    posted = _session(ranks).posted(BOARD)
    return Sample.of(posted) if posted and all(one is not None for one in posted) else None


def unwatch_counters(ranks: Any) -> None:
    """Stops watching. The ranks must be idle."""
    _session(ranks).eval(f"{_RANK_SIDE}.stop()")


def _session(ranks: Any) -> Any:
    if not hasattr(ranks, "posted"):
        raise ValueError(f"ranks must be a launched session, got {ranks!r:.60}. Fix: ranks = launch(2)")
    return ranks


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None

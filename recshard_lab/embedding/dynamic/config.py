"""What a dynamic table is. No torch here, so that the planner needs none."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, ClassVar

from recshard_lab.embedding.configs import DataType, EmbeddingBagConfig, PoolingType

# Sizes of an index: buckets of 128 slots, in partitions, which are what ranks divide among them. No torch here.


SLOTS = 128
PARTITION_BUCKETS = 64  # buckets of a partition at the largest size, where that leaves several partitions
LEAST_PARTITIONS, MOST_PARTITIONS = 8, 64  # where there are as many buckets


def partitions_for(capacity: int) -> int:
    """A power of two: one partition for each `PARTITION_BUCKETS` buckets, but `LEAST_PARTITIONS` if that is more.

    >>> partitions_for(128), partitions_for(1000), partitions_for(16 * 8192), partitions_for(1 << 24)
    (1, 8, 16, 64)
    """
    buckets = -(-capacity // SLOTS)
    many = max(min(LEAST_PARTITIONS, buckets), buckets // PARTITION_BUCKETS)
    return min(MOST_PARTITIONS, 1 << (many.bit_length() - 1))


def buckets_for(capacity: int, partitions: int) -> int:
    """Buckets of each partition."""
    return -(-capacity // (SLOTS * partitions))


def slots_for(capacity: int, max_capacity: int) -> int:
    """The slots of an index of these arguments: ``capacity`` rounded up to whole buckets of every partition.

    >>> slots_for(1000, 1000), slots_for(1000, 1_000_000)
    (1024, 8192)
    """
    partitions = partitions_for(max_capacity)
    return partitions * buckets_for(capacity, partitions) * SLOTS


# Descriptions of the slower tiers of a table. No torch here, so that the planner needs none.


KINDS = ("host", "disk", "redis")
MODES = ("hybrid", "cache")


@dataclass(frozen=True)
class EmulatedCost:
    """Makes each access to a tier take at least as long as a slower memory takes.

    It serves for lessons and benchmarks on machines without that memory. Figures label such a tier as emulated.

    Args:
        latency_us: microseconds for each batch access, of any size.
        gb_per_s: bandwidth in GB/s for the rows that are read or written. Default: not limited.

    Raises:
        ValueError: a negative latency, or a bandwidth that is not positive.

    >>> EmulatedCost(20, gb_per_s=2).seconds(40_000)
    4e-05
    """

    latency_us: float = 0.0
    gb_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("latency_us", 0.0), ("gb_per_s", 1e-12)):
            value = getattr(self, name)
            if value is None and name == "gb_per_s":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e12:
                sign = "non-negative" if name == "latency_us" else "positive"
                raise ValueError(f"EmulatedCost: {name}={value!r} is not supported. Fix: use a {sign} number")

    def seconds(self, num_bytes: int) -> float:
        """The least time of one access that reads or writes so many bytes."""
        transfer = 0.0 if self.gb_per_s is None else num_bytes / self.gb_per_s / 1e9
        return self.latency_us / 1e6 + transfer


@dataclass(frozen=True)
class Tier:
    """A slower memory below the fast tier of a dynamic table. See ``DynamicEmbeddingConfig(tiers=)``.

    Args:
        kind: ``"host"``: host memory. ``"disk"``: a database in a folder (LMDB), which is kept between runs. It needs
            the extra ``tiers``. ``"redis"``: a Redis server. It needs the extra ``tiers``.
        capacity: rows of the whole table, for ``"host"``: a full tier moves the row with the lowest score to the next
            tier. Rounded up to whole buckets of 128 rows for each partition of the table.
        path: the folder, for ``"disk"``. Each shard has a folder in it.
        url: of the server, for ``"redis"``, such as ``"redis://localhost:6379/0"`` or ``"unix:///run/redis.sock"``.
        mode: ``"hybrid"``: a row that moves to the fast tier leaves this tier. ``"cache"``: this tier keeps its copy,
            and the row overwrites the copy when it loses its slot in the fast tier.
        cost: makes this tier slower.
        name: in counters and errors. Default: the kind.

    Raises:
        ValueError: an argument that is none of these, or that the kind does not have.

    >>> Tier("host", capacity=1e6).name
    'host'
    """

    kind: str
    capacity: int | float | None = None
    path: str | PathLike[str] | None = None
    url: str | None = None
    mode: str = "hybrid"
    cost: EmulatedCost | None = None
    name: str = ""

    def __post_init__(self) -> None:
        self._check("kind", isinstance(self.kind, str) and self.kind in KINDS, _listed(KINDS))
        self._check("mode", isinstance(self.mode, str) and self.mode in MODES, _listed(MODES))
        self._check("cost", self.cost is None or isinstance(self.cost, EmulatedCost), "an EmulatedCost")
        self._check("name", isinstance(self.name, str) and self.name != "fast", "another name")
        needed = dict(zip(KINDS, ("capacity", "path", "url"), strict=True))[self.kind]
        for name in ("capacity", "path", "url"):
            if name != needed and getattr(self, name) is not None:
                raise ValueError(f"Tier({self.kind!r}) has no {name}. Fix: omit {name}=")
        value = getattr(self, needed)
        if value is None:
            raise ValueError(f"Tier({self.kind!r}) needs {needed}. Fix: pass {needed}=")
        if needed == "capacity":
            self._check("capacity", _is_whole(value), "a positive integer")
            object.__setattr__(self, "capacity", int(value))
        else:
            self._check(needed, isinstance(value, str | PathLike), "a string")
            object.__setattr__(self, needed, fspath(value))
        object.__setattr__(self, "name", self.name or self.kind)

    def _check(self, name: str, right: bool, expected: str) -> None:
        if not right:
            raise ValueError(f"Tier: {name}={getattr(self, name)!r} is not supported. Fix: use {expected}")


def _is_whole(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 1 <= value < 2**48 and value == int(value)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))


EVICT = ("lru", "lfu", "epoch_lru", "epoch_lfu")
ABSENT = ("initial", "zero")


@dataclass(init=False)
class DynamicEmbeddingConfig(EmbeddingBagConfig):
    """A table whose rows belong to the ids that occur: any int64 ids, no vocabulary.

    Args:
        name: unique among the tables of a collection.
        embedding_dim: columns D.
        capacity: rows at first. Rounded up to whole buckets of 128 rows.
        max_capacity: rows up to which the table doubles when it is 90% full. At that size it evicts. Default:
            ``capacity``.
        feature_names: the features looked up in this table. Default: one feature of the table's name.
        evict: which id loses its row: that with the lowest score. ``"lru"``: least recently used. ``"lfu"``: least
            frequently used. ``"epoch_lru"``, ``"epoch_lfu"``: ids of earlier epochs first. A function of ids
            ``[N]`` int64: their scores, ``[N]`` int64.
        admit: which absent ids get a row. A number ``n``: those that occurred ``n`` times. A fraction below 1: each
            occurrence with that probability. A function of the absent ids ``[M]`` int64: those for which it returns
            True, ``[M]`` bool. Default: all.
        absent: what an id without a row looks up: its ``"initial"`` row, which no gradient reaches, or ``"zero"``.
        pooling: how a bag's rows become one vector.
        data_type: number format of the rows.
        choices: buckets in which an id may be, 1 or 2. With 1, lookups of absent ids are faster, and the first eviction
            comes at about 70% of the capacity instead of 95%.
        weight_init_min, weight_init_max: ends of the uniform initial values. Default: ``1 / sqrt(max_capacity)``.
        tiers: slower memories for the rows that have no slot, fastest first. A row that loses its slot moves to the
            first tier, what a full tier loses moves to the next one, and a row comes up when its id occurs in training.
            Optimizer states and scores move with rows. Ids of a batch that find no slot are trained too, and their rows
            are written to the tiers. Default: rows without a slot are lost.
        seed: initial values are a function of the seed, the table's name, the id and the column.

    Raises:
        ValueError: an argument that is none of these.

    >>> DynamicEmbeddingConfig("user", 64, capacity=1e6, max_capacity=4e6, evict="lfu").num_embeddings
    4005888
    """

    dynamic: ClassVar[bool] = True

    capacity: int = 0
    max_capacity: int = 0
    evict: str | Callable[[Any], Any] = "lru"
    admit: int | float | Callable[[Any], Any] | None = None
    absent: str = "initial"
    choices: int = 2
    tiers: tuple[Tier, ...] = ()
    seed: int = 0

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        capacity: int | float,
        max_capacity: int | float | None = None,
        feature_names: list[str] | tuple[str, ...] = (),
        evict: str | Callable[[Any], Any] = "lru",
        admit: int | float | Callable[[Any], Any] | None = None,
        absent: str = "initial",
        pooling: PoolingType = PoolingType.SUM,
        data_type: DataType = DataType.FP32,
        choices: int = 2,
        weight_init_min: float | None = None,
        weight_init_max: float | None = None,
        tiers: list[Tier] | tuple[Tier, ...] = (),
        seed: int = 0,
    ) -> None:
        self.name, self.pooling, self.data_type = name, pooling, data_type
        most = capacity if max_capacity is None else max_capacity
        for field_name, value in (("capacity", capacity), ("max_capacity", most), ("embedding_dim", embedding_dim)):
            setattr(self, field_name, value)
            self._require(field_name, _is_whole(value), "be a positive integer")
            setattr(self, field_name, int(value))
        self.num_embeddings = slots_for(self.max_capacity, self.max_capacity)
        self.weight_init_min, self.weight_init_max = weight_init_min, weight_init_max
        self.feature_names = list(feature_names) if isinstance(feature_names, tuple) else feature_names
        self.evict, self.admit, self.absent, self.choices, self.seed = evict, admit, absent, choices, seed
        self.tiers = tiers  # type: ignore[assignment]
        self.init_fn = None
        self.__post_init__()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_capacity < self.capacity:
            raise ValueError(
                f"table {self.name!r}: capacity {self.capacity:,} is above max_capacity {self.max_capacity:,}. "
                f"Fix: raise max_capacity"
            )
        self.feature_names = self.feature_names or [self.name]
        evict, choices = self.evict, self.choices
        known = callable(evict) or (isinstance(evict, str) and evict in EVICT)
        self._check("evict", known, f"{_listed(EVICT)}, or a function of ids")
        self._check("absent", isinstance(self.absent, str) and self.absent in ABSENT, _listed(ABSENT))
        self._check("choices", isinstance(choices, int) and choices in (1, 2), "1 or 2")
        self._check("pooling", isinstance(self.pooling, PoolingType), "a PoolingType")
        self._check("seed", isinstance(self.seed, int), "an integer")
        tiers = self.tiers
        known = isinstance(tiers, list | tuple) and all(isinstance(tier, Tier) for tier in tiers)
        self._check("tiers", known, "a list of Tier")
        self.tiers = tuple(tiers)
        names = [tier.name for tier in tiers]
        self._check("tiers", len(set(names)) == len(names), "tiers with different names: Tier(name=)")
        for end in ("weight_init_min", "weight_init_max"):
            value = getattr(self, end)
            self._check(end, value is None or (isinstance(value, int | float) and abs(value) < 1e30), "a number")
            setattr(self, end, None if value is None else float(value))
        admit = self.admit
        number = isinstance(admit, int | float) and (0 < admit < 1 or (1 <= admit < 2**31 and admit == int(admit)))
        expected = "a probability between 0 and 1, a number of occurrences, or a function of ids"
        self._check("admit", admit is None or callable(admit) or number, expected)

    def changed(self, **fields: Any) -> DynamicEmbeddingConfig:
        """A copy with other values of these attributes."""
        other = copy(self)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    def _check(self, name: str, right: bool, expected: str) -> None:
        if not right:
            value = getattr(self, name)
            raise ValueError(f"table {self.name!r}: {name}={value!r} is not supported. Fix: use {expected}")

    @property
    def partitions(self) -> int:
        """Equal parts of the index. Shards of a table have whole partitions."""
        return partitions_for(self.max_capacity)

    @property
    def buckets(self) -> int:
        """Buckets of each partition at first."""
        return buckets_for(self.capacity, self.partitions)

    @property
    def max_buckets(self) -> int:
        """Buckets of each partition of a table that has grown."""
        return max(self.buckets, buckets_for(self.max_capacity, self.partitions))

    @property
    def row_unit(self) -> int:
        """Rows of a partition: row shards have whole partitions."""
        return self.num_embeddings // self.partitions

    @property
    def index_bytes_per_row(self) -> int:
        """Bytes of `ScoredIndex`'s arrays for a slot: the id, its tag, its score and the step of its last access.

        Twice as many if admission counts ids without a row.
        """
        return (8 + 2 + 16) * (2 if self.counts_absent_ids else 1)

    @property
    def counts_absent_ids(self) -> bool:
        """Whether admission counts the occurrences of ids without a row."""
        return isinstance(self.admit, int | float) and self.admit >= 1

    @property
    def init_range(self) -> tuple[float, float]:
        """Ends of the uniform initial values."""
        default = self.max_capacity**-0.5
        low, high = self.weight_init_min, self.weight_init_max
        return -default if low is None else low, default if high is None else high

"""What a dynamic table is. No torch here, so that the planner needs none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recshard_lab.embedding.configs import DataType, PoolingType

EVICT = ("lru", "lfu", "epoch_lru", "epoch_lfu")
ABSENT = ("initial", "zero")


@dataclass
class DynamicEmbeddingConfig:
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
        seed: initial values are a function of the seed, the table's name, the id and the column.

    Raises:
        ValueError: an argument that is none of these.

    >>> DynamicEmbeddingConfig("user", 64, capacity=1e6, max_capacity=4e6, evict="lfu").num_embeddings
    4000000
    """

    name: str
    embedding_dim: int
    capacity: int
    max_capacity: int | None = None
    feature_names: list[str] = field(default_factory=list)
    evict: str | Callable[[Any], Any] = "lru"
    admit: int | float | Callable[[Any], Any] | None = None
    absent: str = "initial"
    pooling: PoolingType = PoolingType.SUM
    data_type: DataType = DataType.FP32
    choices: int = 2
    weight_init_min: float | None = None
    weight_init_max: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.embedding_dim = self._whole("embedding_dim", self.embedding_dim)
        self.capacity = self._whole("capacity", self.capacity)
        self.max_capacity = (
            self.capacity if self.max_capacity is None else self._whole("max_capacity", self.max_capacity)
        )
        if self.max_capacity < self.capacity:
            raise ValueError(
                f"table {self.name!r}: capacity {self.capacity:,} is above max_capacity {self.max_capacity:,}. "
                f"Fix: raise max_capacity"
            )
        self.feature_names = list(self.feature_names) or [self.name]
        for name, known in (("evict", EVICT), ("absent", ABSENT), ("choices", (1, 2))):
            value = getattr(self, name)
            if value not in known and not (name == "evict" and callable(value)):
                raise ValueError(
                    f"table {self.name!r}: {name}={value!r} is not supported. "
                    f"Fix: use one of {', '.join(map(repr, known))}"
                )
        admit = self.admit
        if admit is not None and not callable(admit) and not (0 < admit < 1 or (admit >= 1 and admit == int(admit))):
            raise ValueError(
                f"table {self.name!r}: admit={admit!r} is not supported. Fix: use a probability between 0 and 1, a "
                f"number of occurrences, or a function"
            )

    def _whole(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
            raise ValueError(f"table {self.name!r}: {name} must be a positive integer, got {value!r}")
        return int(value)

    @property
    def num_embeddings(self) -> int:
        """The most rows."""
        assert self.max_capacity is not None
        return self.max_capacity

    @property
    def init_range(self) -> tuple[float, float]:
        """Ends of the uniform initial values."""
        default = self.num_embeddings**-0.5
        low, high = self.weight_init_min, self.weight_init_max
        return -default if low is None else low, default if high is None else high

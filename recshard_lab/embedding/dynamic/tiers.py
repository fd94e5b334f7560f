"""Descriptions of the slower tiers of a table. No torch here, so that the planner needs none."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath

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
            whole = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < 2**48
            self._check("capacity", whole and value == int(value), "a positive integer")
            object.__setattr__(self, "capacity", int(value))
        else:
            self._check(needed, isinstance(value, str | PathLike), "a string")
            object.__setattr__(self, needed, fspath(value))
        object.__setattr__(self, "name", self.name or self.kind)

    def _check(self, name: str, right: bool, expected: str) -> None:
        if not right:
            raise ValueError(f"Tier: {name}={getattr(self, name)!r} is not supported. Fix: use {expected}")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))

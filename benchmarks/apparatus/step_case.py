"""One case for both sides: tables, batches, ids, optimizer, and a plan as plain shards."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.embedding import EmbeddingBagConfig, PoolingType
from recshard_lab.sharding import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    Topology,
    scheme_named,
    scheme_names,
)

SGD, ROWWISE, ADAGRAD = "exact_sgd", "exact_row_wise_adagrad", "exact_adagrad"
SHORT = {SGD: "SGD", ROWWISE: "row-wise Adagrad", ADAGRAD: "Adagrad"}
ZIPF = 1.2
FLAT = ("table_wise", "row_wise", "column_wise", "data_parallel", "mixed")
BY_NODE = ("table_row_wise", "table_column_wise", "grid_shard")


@dataclass(frozen=True)
class StepCase:
    """The settings of one training step.

    Args:
        layout: a registered scheme's name, "mixed": four schemes in one plan, "every_scheme": all registered ones in
            one plan, "fused": one process without a plan.
        optimizer: fused into backward, by fbgemm's name.
        ids: "uniform", or "zipf": the k-th most frequent row is read with probability ~ 1 / k^1.2. Frequent rows are
            spread at random over the table.
        tables, rows, dim: tables of the same size, each read by one feature.
        batch: samples of one rank.
        pooling: ids of every bag.
        ranks, local_ranks: ranks in all, and of one virtual node.
        threads: of each rank.
        mean: pooled by mean instead of sum.
        kernel: this library's lookup kernel by name; the preferred one if empty.
        route: this library's output path of all tables.
        wire: number format of rows and gradients in messages, "fp32", "fp16", ...; TorchRec's side takes "fp32" alone.
    """

    layout: str
    optimizer: str
    ids: str
    tables: int = 8
    rows: int = 100_000
    dim: int = 64
    batch: int = 1024
    pooling: int = 10
    ranks: int = 2
    local_ranks: int = 2
    threads: int = 1
    mean: bool = False
    wire: str = "fp32"
    kernel: str = ""
    route: str = "direct"

    @property
    def name(self) -> str:
        """The name in tables, which ``--only`` searches.

        >>> StepCase("row_wise", SGD, "zipf").name
        'row_wise, SGD, zipf'
        """
        threads = f", {self.threads} threads" if self.threads > 1 else ""
        nodes = f", 2 nodes x {self.local_ranks}" if self.local_ranks < self.ranks else ""
        mean = ", mean" if self.mean else ""
        wire = f", {self.wire} messages" if self.wire != "fp32" else ""
        kernel = f", kernel {self.kernel}" if self.kernel else ""
        route = f", {self.route}" if self.route != "direct" else ""
        return f"{self.layout}{threads}{nodes}, {SHORT[self.optimizer]}, {self.ids}{mean}{wire}{kernel}{route}"

    @property
    def samples(self) -> int:
        """Of a step on all ranks."""
        return self.batch * self.ranks

    def table_names(self) -> list[str]:
        """In the order of the features ``f0``, ``f1``, ..."""
        return [f"t{i}" for i in range(self.tables)]

    def configs(self) -> list[EmbeddingBagConfig]:
        """The tables, as this library declares them."""
        pooling = PoolingType.MEAN if self.mean else PoolingType.SUM
        return [
            EmbeddingBagConfig(self.rows, self.dim, name, feature_names=[f"f{i}"], pooling=pooling)
            for i, name in enumerate(self.table_names())
        ]

    def plan(self) -> ShardingPlan:
        """The same shards for both sides: the schemes' first proposals, placed on the ranks in turn."""
        topology = Topology(self.ranks, local_world_size=self.local_ranks)
        mixes = {"mixed": ("table_wise", "row_wise", "column_wise", "data_parallel"), "every_scheme": scheme_names()}
        mix = mixes.get(self.layout, (self.layout,))
        entries = {
            table.name: _cut(mix[i % len(mix)], table, topology, i // len(mix))
            for i, table in enumerate(self.configs())
        }
        plan = ShardingPlan({"": EmbeddingModuleShardingPlan(entries)})
        return plan if self.route == "direct" else plan.with_route(self.route)

    def bag_ids(self, rank: int, number: int) -> NDArray[np.int64]:
        """The ids of a rank's batch, table by table: [tables * batch * pooling]."""
        draw = np.random.default_rng([number, rank, zlib.crc32(self.ids.encode())])
        count = self.batch * self.pooling
        if self.ids == "uniform":
            return draw.integers(0, self.rows, self.tables * count)
        chances, order = _zipf(self.rows)
        return order[np.searchsorted(chances, draw.random(self.tables * count)).clip(max=self.rows - 1)]

    def first_weights(self) -> dict[str, NDArray[np.float32]]:
        """Initial weights where weights are compared."""
        return {
            name: np.random.default_rng([7, i]).normal(0, 0.1, (self.rows, self.dim)).astype(np.float32)
            for i, name in enumerate(self.table_names())
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return asdict(self)


def rectangles(plan: ShardingPlan) -> dict[str, dict[str, Any]]:
    """A plan for another library's adapter: table -> scheme and [rank, rows, cols] of each shard."""
    return {
        name: {"scheme": entry.sharding_type, "shards": [[s.rank, list(s.rows), list(s.cols)] for s in entry.shards]}
        for name, entry in plan.tables().items()
    }


def smaller(case: StepCase, **sizes: int) -> StepCase:
    """The case with other sizes."""
    return replace(case, **sizes)  # type: ignore[arg-type]


def named(cases: Sequence[StepCase], only: Sequence[str]) -> list[StepCase]:
    """The cases that have any of `only` in their names; all when it is empty.

    Raises:
        ValueError: a part that no case has in its name.

    >>> [case.layout for case in named([StepCase("row_wise", SGD, "zipf"), StepCase("mixed", SGD, "zipf")], ["row"])]
    ['row_wise']
    """
    for part in only:
        if not any(part in case.name for case in cases):
            some = f"{cases[0].name!r}, {cases[-1].name!r}"
            layouts = ", ".join(dict.fromkeys(case.layout for case in cases))
            raise ValueError(f"no case has {part!r} in its name; names are like {some}, with one of: {layouts}")
    return [case for case in cases if not only or any(part in case.name for part in only)]


def from_dict(data: Mapping[str, Any]) -> StepCase:
    """Reads `StepCase.to_dict`."""
    return StepCase(**data)


def _cut(scheme: str, table: EmbeddingBagConfig, topology: Topology, turn: int) -> ParameterSharding:
    proposal = next(iter(scheme_named(scheme).propose(table, topology)), None)
    if proposal is None:  # a scheme that proposes nothing unasked
        return scheme_named(scheme).default(table, topology)
    if proposal.assignments:
        return proposal.placed(proposal.assignments[turn % len(proposal.assignments)])
    return proposal.placed([(turn + i) % topology.world_size for i in range(len(proposal.rects))])


@lru_cache(maxsize=4)
def _zipf(rows: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF
    return np.cumsum(weights / weights.sum()), np.random.default_rng(0).permutation(rows)

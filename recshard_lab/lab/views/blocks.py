"""A plan's rectangles as the pictures need them: who holds which part of which table, and how many bytes that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.draw.theme import SCHEMES, bytes_text, count_text, look_of
from recshard_lab.sharding import ParameterSharding, ShardingPlan
from recshard_lab.sharding.plan.types import DDR


@dataclass(frozen=True, slots=True)
class Block:
    """One shard, with what a reader wants to know of it."""

    table: str
    scheme: str
    kernel: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    of_rows: int
    of_cols: int
    num_bytes: float
    count: int = 1  # shards, where several were merged into one block
    route: str = "direct"  # by which its rows come home
    note: str = ""  # what else there is to say of it
    in_host: bool = False  # lies in the host's memory, not the rank's own

    @property
    def name(self) -> str:
        return self.table if self.count == 1 else f"{self.count:,} {self.table}"

    @property
    def whole(self) -> bool:
        return self.rows == (0, self.of_rows) and self.cols == (0, self.of_cols)

    @property
    def part(self) -> str:
        """Which part of its table: the sizes of a whole table, else the range it is cut by."""
        if self.count > 1:
            return bytes_text(self.num_bytes)
        if self.whole:
            return f"{count_text(self.of_rows)} x {self.of_cols}"
        pieces = []
        if self.rows != (0, self.of_rows):
            pieces.append(f"rows {self.rows[0]:,} to {self.rows[1]:,}")
        if self.cols != (0, self.of_cols):
            pieces.append(f"cols {self.cols[0]} to {self.cols[1]}")
        return ", ".join(pieces)

    @property
    def short_part(self) -> str:
        """As `part` where there is little room: how much of the table instead of which."""
        rows, cols = self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]
        return f"{count_text(rows)} x {cols}"

    @property
    def hover(self) -> str:
        if self.count > 1:
            return f"{self.name}: {bytes_text(self.num_bytes)} together{self.note}"
        return (
            f"{self.table} ({self.scheme}, {self.kernel} kernel)\n"
            f"rows {self.rows[0]:,} to {self.rows[1]:,} of {self.of_rows:,}\n"
            f"cols {self.cols[0]} to {self.cols[1]} of {self.of_cols}\n"
            f"{bytes_text(self.num_bytes)}{self.note}"
            + ("" if self.route == "direct" else f"\nrows come home by {self.route}")
        )


def merged_by_scheme(blocks: Sequence[Block]) -> list[Block]:
    """One block per scheme and memory, the largest first: what a column shows when there are too many shards to tell
    apart."""
    groups: dict[tuple[str, bool], list[Block]] = {}
    for block in blocks:
        groups.setdefault((block.scheme, block.in_host), []).append(block)
    merged = [
        group[0]
        if len(group) == 1
        else Block(
            f"{look_of(scheme, SCHEMES).label} shards",
            scheme,
            "",
            (0, 1),
            (0, 1),
            1,
            1,
            sum(block.num_bytes for block in group),
            len(group),
            note=", in the host's memory" if in_host else "",
            in_host=in_host,
        )
        for (scheme, in_host), group in groups.items()
    ]
    return sorted(merged, key=lambda block: -block.num_bytes)


def route_of(table: BaseEmbeddingConfig, sharding: ParameterSharding) -> str:
    """The route that a table's rows take: "reduce_scatter" is "direct" where every shard has all rows."""
    cut = any(shard.num_rows < table.num_embeddings for shard in sharding.shards)
    return "direct" if sharding.route == "reduce_scatter" and not cut else sharding.route


def blocks_by_rank(
    plan: ShardingPlan, tables: Sequence[BaseEmbeddingConfig], world_size: int, local_world_size: int | None = None
) -> list[list[Block]]:
    """Per rank its blocks, the largest tables first, the same order on every rank.

    Raises:
        PlanError: plan and tables do not name the same tables.
        ValueError: a shard on a rank beyond ``world_size``.
    """
    found: list[list[Block]] = [[] for _ in range(world_size)]
    pairs = sorted(plan.pairs(tables), key=lambda pair: (-pair[0].weight_bytes, pair[0].name))
    for table, sharding in pairs:
        each = table.data_type.bytes_per_element
        sharding = sharding.resolved(table, world_size, local_world_size)
        route = route_of(table, sharding)
        for shard, copy in zip(sharding.shards, sharding.replica_flags, strict=True):
            if not 0 <= shard.rank < world_size:
                raise ValueError(
                    f"table {table.name!r} has a shard on rank {shard.rank}, but there are {world_size} ranks: "
                    f"give a topology with world_size {shard.rank + 1}"
                )
            found[shard.rank].append(
                Block(
                    table.name,
                    sharding.sharding_type,
                    sharding.compute_kernel,
                    shard.rows,
                    shard.cols,
                    table.num_embeddings,
                    table.embedding_dim,
                    shard.num_elements * each,
                    route="direct" if copy else route,
                    note=(", on every rank" if copy else "") + (", in the host's memory" if shard.tier == DDR else ""),
                    in_host=shard.tier == DDR,
                )
            )
    return found

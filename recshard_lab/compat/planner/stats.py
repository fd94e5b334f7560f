"""Reports on a finished plan: bytes and time of each rank, and the options of each table."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from math import log
from typing import Any

from recshard_lab.compat.planner.base import Constraints, Enumerator, PlanDebugStats, Stats, StorageReservation
from recshard_lab.compat.planner.costs import Perf, Storage
from recshard_lab.compat.planner.options import ShardingOption
from recshard_lab.compat.planner.topology import Topology
from recshard_lab.compat.planner.utils import bytes_to_gb
from recshard_lab.sharding import ShardingPlan
from recshard_lab.text_table import TextTable

logger = logging.getLogger(__name__)
MIN_WIDTH = 90


def _total_variation(p: Sequence[float]) -> float:
    """The largest difference from ``1 / n``."""
    return max(abs(x - 1 / len(p)) for x in p)


def _total_distance(p: Sequence[float]) -> float:
    """The sum of the differences from ``1 / n``."""
    return sum(abs(x - 1 / len(p)) for x in p)


def _chi_divergence(p: Sequence[float]) -> float:
    """The chi-squared divergence from ``1 / n``, divided by its largest value for shares."""
    n = len(p)
    return n * sum((x - 1 / n) ** 2 for x in p) / (n - 1) if n > 1 else 0.0


def _kl_divergence(p: Sequence[float]) -> float:
    """The Kullback-Leibler divergence from ``1 / n``, divided by its largest value for shares."""
    n = len(p)
    return sum(x * log(x * n) for x in p if x > 0) / log(n) if n > 1 else 0.0


IMBALANCE_STAT_MEASURE: dict[str, tuple[Callable[..., float], dict[str, Any]]] = {
    "Total Variation": (_total_variation, {}),
    "Total Distance": (_total_distance, {}),
    "Chi Divergence": (_chi_divergence, {}),
    "KL Divergence": (_kl_divergence, {}),
}
"""Measure -> function of the ranks' shares ``[W]``, and its further arguments. 0 of an even distribution."""


def round_to_one_sigfig(x: float) -> str:
    """A number with one significant digit.

    >>> round_to_one_sigfig(1234), round_to_one_sigfig(0.0567)
    ('1000', '0.06')
    """
    return f"{float(f'{x:.1g}'):g}"


class EmbeddingStats(Stats):
    """Writes a report on a plan to the log, at level INFO. `lines` has the last report.

    >>> EmbeddingStats().lines
    []
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(
        self,
        sharding_plan: ShardingPlan,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: Constraints | None = None,
        sharders: list[Any] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = True,
        debug_stats: PlanDebugStats | None = None,
    ) -> None:
        """Reports on a plan.

        Args:
            sharding_plan: the plan. topology: its devices. batch_size: samples per rank.
            storage_reservation, constraints, sharders, enumerator, debug_stats: of the planner.
            num_proposals, num_plans: proposals tried, and those that fit. run_time: seconds.
            best_plan: the plan's options, with costs and ranks.
            debug: whether to list tables.
        """
        head = [
            f"{num_plans} of {num_proposals} proposals fit; {run_time:.3f} s; batch size {batch_size}",
            f"memory reserved by {type(storage_reservation).__name__}",
        ]
        self.lines = "\n".join(self._text(head, topology, best_plan, debug)).splitlines()
        for line in self.lines:
            logger.info(line)

    def _text(self, head: list[str], topology: Topology, best_plan: list[ShardingOption], debug: bool) -> list[str]:
        used = [Storage(0, 0) for _ in topology.devices]
        perfs = [Perf(0, 0, 0, 0) for _ in topology.devices]
        kinds: list[Counter[str]] = [Counter() for _ in topology.devices]
        for option in best_plan:
            for shard in option.shards:
                if shard.rank is not None:
                    used[shard.rank] += shard.storage or Storage(0, 0)
                    perfs[shard.rank] += shard.perf or Perf(0, 0, 0, 0)
                    kinds[shard.rank][option.sharding_type] += 1
        ranks = TextTable(
            ("rank", "HBM (GiB)", "DDR (GiB)", "time (ms)", "shards"),
            [
                (
                    str(rank),
                    f"{bytes_to_gb(used[rank].hbm):.3f}",
                    f"{bytes_to_gb(used[rank].ddr):.3f}",
                    f"{perfs[rank].total:.4f}",
                    ", ".join(f"{count} {kind}" for kind, count in sorted(kinds[rank].items())),
                )
                for rank in range(len(topology.devices))
            ],
        )
        total = sum(perf.total for perf in perfs)
        shares = [perf.total / total if total else 1 / len(perfs) for perf in perfs]
        text = [
            *head,
            str(ranks),
            *(
                f"{name} of time: {measure(shares, **more):.3f}"
                for name, (measure, more) in IMBALANCE_STAT_MEASURE.items()
            ),
        ]
        if debug:
            rows = [
                (o.fqn, o.sharding_type, o.compute_kernel, str(o.num_shards), f"{o.total_perf:.4f}", _ranks(o))
                for o in best_plan
            ]
            text.append(str(TextTable(("table", "scheme", "kernel", "shards", "time (ms)", "ranks"), rows)))
        return text


def _ranks(option: ShardingOption) -> str:
    return ", ".join("-" if rank is None else str(rank) for rank in option.get_shards_assignment())


class NoopEmbeddingStats(EmbeddingStats):
    """Reports nothing. Arguments of `log` are those of `EmbeddingStats.log`."""

    def _text(self, *_: Any) -> list[str]:
        return []

"""Proposes larger caches for tables in host memory: `EmbeddingOffloadScaleupProposer`."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from math import inf

import torch

from recshard_lab.compat.planner.base import Enumerator
from recshard_lab.compat.planner.options import ShardingOption
from recshard_lab.compat.planner.proposers import Feedback, Proposals, SteppedProposer, sorted_options
from recshard_lab.compat.planner.topology import Topology
from recshard_lab.compat.planner.utils import LuusJaakolaSearch
from recshard_lab.sharding import EmbeddingComputeKernel

_CACHED, _FUSED = str(EmbeddingComputeKernel.FUSED_UVM_CACHING), str(EmbeddingComputeKernel.FUSED)
_ITERATIONS = 16


class EmbeddingOffloadScaleupProposer(SteppedProposer):
    """Starts with the fastest option of every table, then spends free device memory on larger caches.

    Memory is shared in proportion to `get_cacheability` times `get_expected_lookups` of each table. A table whose cache
    would need as much memory as the table itself moves to kernel "fused". `LuusJaakolaSearch` chooses the total.

    Args:
        use_depth: as of `GreedyProposer`.
    """

    def __init__(self, use_depth: bool = True) -> None:
        self._use_depth = use_depth

    def _proposals(self, search_space: list[ShardingOption], enumerator: Enumerator | None) -> Proposals:
        start = deepcopy([own[0] for own in sorted_options(search_space, self._use_depth).values()])
        self.promote_high_prefetch_overheaad_table_to_hbm(enumerator, start)
        result = yield deepcopy(start) or None
        if not result.partitionable or enumerator is None or result.storage_constraint is None:
            return
        if not self.get_scalable_sharding_options(start):
            return
        used = sum(option.total_storage.hbm for option in start)
        free = min(self.get_budget(start, result.storage_constraint), self.get_hbm_ceiling(start, enumerator) - used)
        if free <= 0:
            return
        search = LuusJaakolaSearch(0, free, max_iterations=_ITERATIONS, left_cost=_rating(result))
        budget = search.next(0.0)
        while budget is not None:
            budget = search.next(_rating((yield self.next_plan(start, int(budget), enumerator))))

    @staticmethod
    def get_budget(proposal: list[ShardingOption], storage_constraint: Topology) -> int:
        """Bytes of device memory that a proposal leaves free."""
        capacity = sum(device.storage.hbm for device in storage_constraint.devices)
        return capacity - sum(option.total_storage.hbm for option in proposal)

    @staticmethod
    def get_hbm_ceiling(starting_proposal: list[ShardingOption], enumerator: Enumerator) -> int:
        """Bytes of device memory of a proposal if no table is offloaded."""
        moved = deepcopy(starting_proposal)
        for option in EmbeddingOffloadScaleupProposer.get_scalable_sharding_options(moved):
            _move_to_device(option)
        enumerator.populate_estimates(moved)
        return sum(option.total_storage.hbm for option in moved)

    @staticmethod
    def promote_high_prefetch_overheaad_table_to_hbm(
        enumerator: Enumerator | None, proposal: list[ShardingOption]
    ) -> None:
        """Moves tables to kernel "fused" whose cache and buffers need more device memory than the table itself."""
        if enumerator is None:
            return
        for option in EmbeddingOffloadScaleupProposer.get_scalable_sharding_options(proposal):
            moved = deepcopy(option)
            _move_to_device(moved)
            enumerator.populate_estimates([moved])
            if moved.total_storage.hbm < option.total_storage.hbm:
                _move_to_device(option)
                option.shards = moved.shards

    @staticmethod
    def get_scalable_sharding_options(proposal: list[ShardingOption]) -> list[ShardingOption]:
        """The options with a cache and statistics of it."""
        return [
            option
            for option in proposal
            if option.compute_kernel == _CACHED
            and EmbeddingOffloadScaleupProposer.get_cacheability(option) is not None
            and EmbeddingOffloadScaleupProposer.get_expected_lookups(option) is not None
        ]

    @staticmethod
    def get_cacheability(sharding_option: ShardingOption) -> float | None:
        """The cacheability of an option's statistics; None without them."""
        stats = getattr(sharding_option.cache_params, "stats", None)
        return None if stats is None else float(stats.cacheability)

    @staticmethod
    def get_expected_lookups(sharding_option: ShardingOption) -> float | None:
        """The distinct ids per batch of an option's statistics; None without them."""
        stats = getattr(sharding_option.cache_params, "stats", None)
        return None if stats is None else stats.expected_lookups

    @staticmethod
    def next_plan(
        starting_proposal: list[ShardingOption], budget: int | None, enumerator: Enumerator | None
    ) -> list[ShardingOption] | None:
        """A copy of a proposal that uses `budget` more bytes for caches; None without a budget or an enumerator."""
        if budget is None or enumerator is None:
            return None
        kind = EmbeddingOffloadScaleupProposer
        proposal = deepcopy(starting_proposal)
        scaled = kind.get_scalable_sharding_options(proposal)
        if not scaled:
            return None
        model, ceiling = kind.build_affine_storage_model(scaled, enumerator)
        shares = torch.tensor([option.cache_load_factor for option in scaled], dtype=torch.float64)
        weights = [(kind.get_cacheability(o) or 0.0) * (kind.get_expected_lookups(o) or 0.0) for o in scaled]
        shares = kind.allocate_budget(model, ceiling, shares, budget, torch.tensor(weights))
        full = kind.clf_to_bytes(model, shares) >= ceiling
        for option, share, whole in zip(scaled, shares.tolist(), full.tolist(), strict=True):
            if whole or share >= 1:
                _move_to_device(option)
            else:
                option.cache_params = replace_load_factor(option.cache_params, share)
        enumerator.populate_estimates(proposal)
        return proposal

    @staticmethod
    def build_affine_storage_model(
        uvm_caching_sharding_options: list[ShardingOption], enumerator: Enumerator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Device memory of cached options by load factor.

        Returns:
            ``[T, 2]``: bytes per unit of load factor, and bytes at 0. ``[T]``: bytes with kernel "fused".
        """

        def measured(load_factor: float | None) -> torch.Tensor:
            trial = deepcopy(uvm_caching_sharding_options)
            for option in trial:
                if load_factor is None:
                    _move_to_device(option)
                else:
                    option.cache_params = replace_load_factor(option.cache_params, load_factor)
            enumerator.populate_estimates(trial)
            return torch.tensor([option.total_storage.hbm for option in trial])

        low, high = 0.1, 0.9
        first, last = measured(low).double(), measured(high).double()
        slope = (last - first) / (high - low)
        return torch.stack([slope, first - slope * low], dim=1), measured(None)

    @staticmethod
    def clf_to_bytes(model: torch.Tensor, clfs: float | torch.Tensor) -> torch.Tensor:
        """Bytes ``[T]`` of device memory at load factors: one, or ``[T]``."""
        return model[:, 0].double() * clfs + model[:, 1].double()

    @staticmethod
    def allocate_budget(
        model: torch.Tensor,
        fused_hbm_ceiling: torch.Tensor,
        clfs: torch.Tensor,
        budget: int,
        allocation_priority: torch.Tensor,
    ) -> torch.Tensor:
        """Load factors ``[T]`` after `budget` bytes are shared in proportion to priorities.

        A table takes no more than its memory with kernel "fused", or than a load factor of 1; others share the rest.

        Args:
            model, fused_hbm_ceiling: of `build_affine_storage_model`. clfs: ``[T]`` load factors so far.
            allocation_priority: ``[T]``.

        >>> model, full = torch.tensor([[100.0, 0.0], [200.0, 0.0]]), torch.tensor([100, 200])
        >>> more = EmbeddingOffloadScaleupProposer.allocate_budget(
        ...     model, full, torch.tensor([0.1, 0.2]), 60, torch.tensor([1.0, 2.0]))
        >>> [round(share, 2) for share in more.tolist()]
        [0.3, 0.4]
        """
        used = EmbeddingOffloadScaleupProposer.clf_to_bytes(model, clfs)
        whole = torch.minimum(EmbeddingOffloadScaleupProposer.clf_to_bytes(model, 1.0), fused_hbm_ceiling.double())
        room, weights, left = (whole - used).clamp(min=0), allocation_priority.double(), float(budget)
        added = torch.zeros_like(used)
        for _ in range(len(used)):
            open_ = (added < room) & (weights > 0)
            if left <= 0 or not bool(open_.any()):
                break
            share = torch.where(open_, weights, 0) / weights[open_].sum() * left
            step = torch.minimum(share, room - added)
            added, left = added + step, left - float(step.sum())
        shares = (used + added - model[:, 1].double()) / model[:, 0].double()
        full = used + added >= whole
        at_end = torch.where(full, 1.0, shares)
        return torch.maximum(clfs.double(), at_end).to(clfs.dtype)


def _rating(result: Feedback) -> float:
    return inf if result.perf_rating is None or not result.partitionable else result.perf_rating


def replace_load_factor(cache: object, load_factor: float) -> object:
    """Cache parameters with another load factor."""
    return replace(cache, load_factor=load_factor)  # type: ignore[type-var]


def _move_to_device(option: ShardingOption) -> None:
    option.compute_kernel, option.cache_params = _FUSED, None

"""Which ids a `MCHManagedCollisionModule` keeps when there are more ids than rows. The names are TorchRec's.

Shape letters: R rows of a bucket, M distinct ids since the last eviction, U those of them without a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

ThresholdFilter = Callable[[Tensor], tuple[Tensor, float | Tensor]]
COUNTS, LAST_ACCESS = "counts", "last_access_iter"


class MCHEvictionPolicyMetadataInfo(NamedTuple):
    """One number that a policy keeps.

    Attributes:
        metadata_name: its name.
        is_mch_metadata: whether each row has it, ``[R]`` int64. It is in the state dict.
        is_history_metadata: whether each id seen since the last eviction has it, int64.
    """

    metadata_name: str
    is_mch_metadata: bool
    is_history_metadata: bool


class MCHEvictionPolicy(ABC):
    """Decides which ids have rows. Subclass it for a policy of yours, or use one of the three below.

    Args:
        metadata_info: the numbers that the policy keeps.
        threshold_filtering_func: is passed how often each distinct id occurred, ``[M]`` int64. Returns which ids may
            get rows, ``[M]`` bool, and the threshold. Default: all.
    """

    def __init__(
        self,
        metadata_info: list[MCHEvictionPolicyMetadataInfo],
        threshold_filtering_func: ThresholdFilter | None = None,
    ) -> None:
        self._metadata_info = metadata_info
        self._threshold_filtering_func = threshold_filtering_func

    @property
    def metadata_info(self) -> list[MCHEvictionPolicyMetadataInfo]:
        """The numbers that the policy keeps."""
        return self._metadata_info

    def record_history_metadata(
        self, current_iter: int, incoming_ids: Tensor, history_metadata: dict[str, Tensor]
    ) -> None:
        """Fills the history's numbers of one batch, in place. Default: with the number of the batch.

        Args:
            current_iter: the number of the batch.
            incoming_ids: ``[N]`` its ids.
            history_metadata: name -> ``[N]`` int64.
        """
        for values in history_metadata.values():
            values.fill_(current_iter)

    def coalesce_history_metadata(
        self,
        current_iter: int,
        history_metadata: dict[str, Tensor],
        unique_ids_counts: Tensor,
        unique_inverse_mapping: Tensor,
        additional_ids: Tensor | None = None,
        threshold_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The history's numbers of distinct ids. Default: the last batch in which each occurred.

        Args:
            current_iter: the number of the batch.
            history_metadata: name -> ``[N]``, one number for each id since the last eviction.
            unique_ids_counts: ``[M]`` how often each distinct id occurred.
            unique_inverse_mapping: ``[N]`` the distinct id of each.
            additional_ids: ids after those of the history, accessed in this batch.
            threshold_mask: which distinct ids are returned.
        """
        found = {}
        for name, values in history_metadata.items():
            if additional_ids is not None:
                values = torch.cat([values, torch.full_like(additional_ids, current_iter)])
            last = torch.full_like(unique_ids_counts, -1).scatter_reduce_(0, unique_inverse_mapping, values, "amax")
            found[name] = last if threshold_mask is None else last[threshold_mask]
        return found

    @abstractmethod
    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: Tensor,
        coalesced_history_sorted_unique_ids_counts: Tensor,
        coalesced_history_mch_matching_elements_mask: Tensor,
        coalesced_history_mch_matching_indices: Tensor,
        mch_metadata: dict[str, Tensor],
        coalesced_history_metadata: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Updates the rows' numbers in place, and decides which ids lose their rows.

        Args:
            current_iter: the number of the batch.
            mch_size: R. Rows come in the order of their ids. The last row belongs to all ids without a row.
            coalesced_history_argsort_mapping: ``[M]`` the order of distinct ids, most frequent first.
            coalesced_history_sorted_unique_ids_counts: ``[M]`` how often they occurred, in this order.
            coalesced_history_mch_matching_elements_mask: ``[M]`` which of them have a row, in this order.
            coalesced_history_mch_matching_indices: the rows of these.
            mch_metadata: name -> ``[R]``.
            coalesced_history_metadata: name -> ``[M]``, of distinct ids in ascending order.

        Returns:
            ``[E]`` rows, and ``[E]`` the ids that get them, as positions among the U ids without a row.
        """


class _ByScore(MCHEvictionPolicy):
    """Keeps the ids with the highest scores, which are a function of `COUNTS` and `LAST_ACCESS`."""

    names: ClassVar[tuple[str, ...]] = (COUNTS, LAST_ACCESS)

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: ThresholdFilter | None = None) -> None:
        info = [MCHEvictionPolicyMetadataInfo(name, True, name == LAST_ACCESS) for name in self.names]
        super().__init__(info, threshold_filtering_func)
        self._decay_exponent = decay_exponent

    @abstractmethod
    def _scores(self, current_iter: int, metadata: dict[str, Tensor]) -> Tensor:
        """A score for each entry of the metadata. The lowest ones are evicted."""

    def _age(self, current_iter: int, metadata: dict[str, Tensor]) -> Tensor:
        """Batches since the last use, counting this one, to a power."""
        return (current_iter - metadata[LAST_ACCESS] + 1).double().pow(self._decay_exponent)

    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: Tensor,
        coalesced_history_sorted_unique_ids_counts: Tensor,
        coalesced_history_mch_matching_elements_mask: Tensor,
        coalesced_history_mch_matching_indices: Tensor,
        mch_metadata: dict[str, Tensor],
        coalesced_history_metadata: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """As of `MCHEvictionPolicy`. Among equal scores, ids that have a row keep it."""
        present, rows = coalesced_history_mch_matching_elements_mask, coalesced_history_mch_matching_indices
        new = {}
        for name, values in mch_metadata.items():
            if name == COUNTS:
                seen = coalesced_history_sorted_unique_ids_counts
                values[rows] += seen[present]
            else:
                seen = coalesced_history_metadata[name][coalesced_history_argsort_mapping]
                values[rows] = seen[present]
            new[name] = seen[~present]
        joined = {name: torch.cat([mch_metadata[name], new[name]]) for name in mch_metadata}
        scores = self._scores(current_iter, joined)
        highest = torch.iinfo(scores.dtype).max if not scores.is_floating_point() else torch.inf
        scores[mch_size - 1] = highest
        order = scores.argsort(descending=True, stable=True)
        kept, lost = order[:mch_size], order[mch_size:]
        evicted, chosen = lost[lost < mch_size], kept[kept >= mch_size] - mch_size
        for name, values in mch_metadata.items():
            values[evicted] = new[name][chosen]
        return evicted, chosen


class LFU_EvictionPolicy(_ByScore):
    """Keeps the most frequently used ids.

    Args:
        threshold_filtering_func: as of `MCHEvictionPolicy`.
    """

    names = (COUNTS,)

    def __init__(self, threshold_filtering_func: ThresholdFilter | None = None) -> None:
        super().__init__(threshold_filtering_func=threshold_filtering_func)

    def _scores(self, current_iter: int, metadata: dict[str, Tensor]) -> Tensor:
        return metadata[COUNTS].clone()


class LRU_EvictionPolicy(_ByScore):
    """Keeps the most recently used ids.

    Args:
        decay_exponent: the power of the number of batches since the last use. It does not change the order.
        threshold_filtering_func: as of `MCHEvictionPolicy`.
    """

    names = (LAST_ACCESS,)

    def _scores(self, current_iter: int, metadata: dict[str, Tensor]) -> Tensor:
        return -self._age(current_iter, metadata)


class DistanceLFU_EvictionPolicy(_ByScore):
    """Keeps ids by the number of their uses, divided by a power of the number of batches since the last use.

    Args:
        decay_exponent: the power.
        threshold_filtering_func: as of `MCHEvictionPolicy`.
    """

    def _scores(self, current_iter: int, metadata: dict[str, Tensor]) -> Tensor:
        return metadata[COUNTS] / self._age(current_iter, metadata)


def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Admits ids that occurred more often than the mean of all. ``[M]`` counts -> ``[M]`` bool and the threshold.

    >>> average_threshold_filter(torch.tensor([1, 2, 6]))[0].tolist()
    [False, False, True]
    """
    return dynamic_threshold_filter(id_counts, 1.0)


def dynamic_threshold_filter(id_counts: Tensor, threshold_skew_multiplier: float = 10.0) -> tuple[Tensor, Tensor]:
    """Admits ids that occurred more often than this multiple of the mean. ``[M]`` counts -> ``[M]`` bool, threshold.

    >>> dynamic_threshold_filter(torch.tensor([1, 2, 6]), 1.5)[0].tolist()
    [False, False, True]
    """
    threshold = id_counts.double().mean() * threshold_skew_multiplier
    return id_counts > threshold, threshold


def probabilistic_threshold_filter(id_counts: Tensor, per_id_probability: float = 0.01) -> tuple[Tensor, Tensor]:
    """Admits each occurrence with a probability. ``[M]`` counts -> ``[M]`` bool, and the ``[M]`` draws.

    The draws are torch's, so that ranks must not share a table's columns.

    >>> probabilistic_threshold_filter(torch.tensor([3, 1]), 1.0)[0].tolist()
    [True, True]
    """
    draws = torch.rand(id_counts.shape, device=id_counts.device)
    return 1 - (1 - per_id_probability) ** id_counts > draws, draws

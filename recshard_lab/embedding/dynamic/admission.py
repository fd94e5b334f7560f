"""Which absent ids get a row.

Shape letters: M distinct absent ids of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.index import ScoredIndex
from recshard_lab.embedding.dynamic.initial import stream_of, uniform


class Admission(Protocol):
    """Decides which absent ids get a row."""

    def __call__(self, ids: Tensor, counts: Tensor) -> Tensor:
        """``[M]`` bool of distinct ids ``[M]`` that occur ``counts [M]`` times in a batch."""

    def state(self) -> dict[str, Any]:
        """What decisions depend on, for `load_state`."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Becomes the admission that `state` was read from."""


class FrequentIds:
    """Admits ids that occurred ``threshold`` times.

    The counts of ids without a row are an index of their own, which forgets the rarest ids when it is full.

    Args:
        threshold: occurrences, those of the current batch included.
        capacity: ids that are counted at a time.

    >>> admit = FrequentIds(2, 128)
    >>> admit(torch.tensor([7, 8]), torch.tensor([1, 2])).tolist()
    [False, True]
    >>> admit(torch.tensor([7]), torch.tensor([1])).tolist()
    [True]
    """

    def __init__(self, threshold: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self.threshold = threshold
        self.counts = ScoredIndex(capacity, evict="lfu", device=device)

    def state(self) -> dict[str, Any]:
        """The counts, for `load_state`."""
        return self.counts.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Becomes the admission that `state` was read from."""
        self.counts.load_state(state)

    def __call__(self, ids: Tensor, counts: Tensor) -> Tensor:
        """``[M]`` bool of ids ``[M]`` that occur ``counts [M]`` times in a batch."""
        found = self.counts.find_or_insert(ids.repeat_interleave(counts)).slots
        slots = found[counts.cumsum(0) - 1]
        scores = torch.where(slots < 0, counts, self.counts.scores[slots])
        admitted = scores >= self.threshold
        self.counts.erase(ids[admitted])
        return admitted


class RandomIds:
    """Admits each occurrence with a probability. The draws are a function of seed, table, id and batch.

    Args:
        probability: above 0, below 1.
    """

    def __init__(self, probability: float, stream: int) -> None:
        self.probability, self.stream, self.batch = probability, stream, 0

    def state(self) -> dict[str, Any]:
        """The number of batches, for `load_state`."""
        return {"batch": self.batch}

    def load_state(self, state: dict[str, Any]) -> None:
        """Becomes the admission that `state` was read from."""
        self.batch = state["batch"]

    def __call__(self, ids: Tensor, counts: Tensor) -> Tensor:
        """``[M]`` bool of ids ``[M]`` that occur ``counts [M]`` times in a batch."""
        self.batch += 1
        draw = uniform(ids, self.stream, (self.batch, self.batch + 1)).squeeze(1)
        return draw < 1 - (1 - self.probability) ** counts


class ChosenIds:
    """Admits the ids for which a function of ids ``[M]`` is True."""

    def __init__(self, function: Callable[[Tensor], Any], table: str) -> None:
        self.function, self.table = function, table

    def state(self) -> dict[str, Any]:
        """Nothing: the function decides alone."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Does nothing."""

    def __call__(self, ids: Tensor, counts: Tensor) -> Tensor:
        """``[M]`` bool.

        Raises:
            ValueError: the function fails, or does not return ``[M]`` bool.
        """
        return of_ids(self.function, ids, torch.bool, f"table {self.table!r}: admit(ids)")


def of_ids(function: Callable[[Tensor], Any], ids: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """What a user's function returns for ids: one value for each.

    Raises:
        ValueError: it fails, or returns something else.
    """
    try:
        found = function(ids)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name} failed on ids {list(ids.shape)}: {error}") from error
    if not isinstance(found, Tensor) or found.dtype != dtype or found.shape != ids.shape:
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"{name} must return {dtype} {list(ids.shape)}, got {what}")
    return found


def admission_of(config: DynamicEmbeddingConfig, capacity: int, device: torch.device | str) -> Admission | None:
    """The admission of a table. It counts up to ``capacity`` ids. None admits all."""
    if config.admit is None:
        return None
    if callable(config.admit):
        return ChosenIds(config.admit, config.name)
    if config.admit < 1:
        return RandomIds(config.admit, stream_of(config.seed, f"{config.name}/admit"))
    return FrequentIds(int(config.admit), capacity, device)

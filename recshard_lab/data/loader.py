"""Batches of any source: sharded by rank, shuffled by seed, resumed exactly.

A *global batch* has the samples of all ranks in one step. Rank r gets a contiguous share of it (`rank_slice`), so that
any number of ranks gets the samples of one process, in the same order. So another number of ranks can resume a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from recshard_lab.arguments import checks_arguments
from recshard_lab.data.ahead import ahead
from recshard_lab.data.batch import Batch
from recshard_lab.data.order import WINDOW, SampleOrder
from recshard_lab.data.ratings import rank_slice
from recshard_lab.data.source import SampleSource

_VERSION = 1
_MOST = 1 << 62


@dataclass(frozen=True)
class Position:
    """Position of a loader: samples of all ranks in this epoch, their total, and the rate."""

    epoch: int
    samples: int
    total: int
    samples_per_second: float

    def __str__(self) -> str:
        share = 100 * self.samples / self.total if self.total else 100.0
        return f"epoch {self.epoch}: {self.samples:,} of {self.total:,} samples ({share:.1f}%)"


class BatchLoader:
    """One rank's batches of a source; each ``for`` over it is one epoch.

    Epoch e of seed s visits the samples in an order drawn from (s, e): the same on every rank and machine, another in
    every epoch (`SampleOrder`). A loop that is left early starts the same epoch again; one that ends begins the next.

    Args:
        source: the samples.
        batch_size: B, samples of a *global* batch, shared by all ranks.
        rank, world_size: the share of each global batch to load.
        shuffle: visit the samples in a drawn order.
        seed: of that order.
        drop_last: leave out a last batch of fewer than B samples. It is kept otherwise and split as evenly as can be:
            a rank may get an empty batch, and every rank gets the same number of batches.
        window: how many samples are mixed at a time; a source of no more is mixed as a whole.
        pin_memory: return batches in page-locked memory. Copies from it to a GPU overlap with computation.
        prefetch: number of batches that a thread prepares ahead; 0 prepares each at its use.
        transform: applied to each batch, e.g. a `MultiHot`.

    Raises:
        ValueError: sizes that cannot be, a rank outside the world, `pin_memory` without a CUDA device.

    >>> from recshard_lab.data import SyntheticClicks
    >>> loader = BatchLoader(SyntheticClicks(10, rows=[4, 9]), batch_size=4, shuffle=True, seed=1)
    >>> [len(batch) for batch in loader], str(loader.position)
    ([4, 4, 2], 'epoch 1: 0 of 10 samples (0.0%)')
    """

    @checks_arguments
    def __init__(
        self,
        source: SampleSource,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        window: int = WINDOW,
        pin_memory: bool = False,
        prefetch: int = 0,
        transform: Callable[[Batch], Batch] | None = None,
    ) -> None:
        if not isinstance(source, SampleSource):
            raise ValueError(f"source must have source, features, batch and len, got {type(source).__name__}")
        for name, value, least in (("batch_size", batch_size, 1), ("window", window, 1), ("prefetch", prefetch, 0)):
            if not least <= value < _MOST:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in [0, {world_size}), got {rank}")
        if not 0 <= seed < _MOST:
            raise ValueError(f"seed must be from 0 to 2**62, got {seed}")
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory=True needs a CUDA device, and there is none here: leave it out")
        self.source, self.batch_size, self.rank, self.world_size = source, batch_size, rank, world_size
        self.shuffle, self.seed, self.drop_last, self.window = shuffle, seed, drop_last, window
        self.pin_memory, self.prefetch, self.transform = pin_memory, prefetch, transform
        self.epoch = 0
        self._handed = 0  # samples of this epoch, of all ranks
        self._begin = 0  # where the next loop over this loader starts
        self._started = self._start_handed = 0.0

    def __len__(self) -> int:
        """Batches (steps) of a whole epoch; the same on every rank."""
        size = len(self.source)
        return size // self.batch_size if self.drop_last else -(-size // self.batch_size)

    @property
    def total(self) -> int:
        """Samples of an epoch, of all ranks."""
        return len(self) * self.batch_size if self.drop_last else len(self.source)

    @property
    def position(self) -> Position:
        """Where it stands, for a progress line."""
        took = time.perf_counter() - self._started if self._started else 0.0
        rate = (self._handed - self._start_handed) / took if took > 0 else 0.0
        return Position(self.epoch, self._handed, self.total, max(0.0, rate))

    def __iter__(self) -> Iterator[Batch]:
        self._handed, self._begin = self._begin, 0
        self._started, self._start_handed = time.perf_counter(), float(self._handed)
        order = SampleOrder(len(self.source), self.seed, self.epoch, self.shuffle, self.window)
        return self._handing_out(order, self.epoch)

    def _handing_out(self, order: SampleOrder, epoch: int) -> Iterator[Batch]:
        begins = range(self._handed, self.total, self.batch_size)
        batches: Iterator[Batch] = (self._prepared(order, begin) for begin in begins)
        if self.prefetch:
            batches = ahead(batches, self.prefetch)
        for begin, batch in zip(begins, batches, strict=True):
            self._handed = min(begin + self.batch_size, self.total)
            if self._handed == self.total:
                self.epoch, self._handed = epoch + 1, 0
            yield batch
        if not begins:  # nothing was left of it
            self.epoch, self._handed = epoch + 1, 0

    def _prepared(self, order: SampleOrder, begin: int) -> Batch:
        size = min(self.batch_size, self.total - begin)
        first, last = rank_slice(size, self.rank, self.world_size)
        batch = self.source.batch(order.stretch(begin + first, begin + last))
        batch = replace(batch, global_size=size, world_size=self.world_size)
        if self.transform is not None:
            batch = self.transform(batch)
        return batch.pin_memory() if self.pin_memory else batch

    # ---- resume ----

    @checks_arguments
    def state_dict(self, batches_ahead: int = 0) -> dict[str, Any]:
        """Where the next batch stands, as numbers and words: for a checkpoint.

        Args:
            batches_ahead: how many of the batches handed out a pipeline still holds untrained; they come again.

        Raises:
            ValueError: more of them than batches of this epoch were handed out.
        """
        epoch, handed = self.epoch, self._handed
        if batches_ahead and handed == 0 and epoch:
            epoch, handed = epoch - 1, self.total
        steps = -(-handed // self.batch_size) - batches_ahead
        if batches_ahead < 0 or steps < 0:
            raise ValueError(f"batches_ahead must be from 0 to the batches handed out, got {batches_ahead!r}")
        return {
            "version": _VERSION,
            "epoch": epoch,
            "samples": handed if batches_ahead == 0 else steps * self.batch_size,
            **self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        """What must be the same for positions to mean the same samples."""
        return {
            "size": len(self.source),
            "features": dict(self.source.features),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "window": self.window,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from the position of another loader of the same samples, at any world size and batch size.

        Raises:
            ValueError: a state of other samples, features, seed, shuffling or window, named; nothing has changed then.
        """
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise ValueError(f"state is not the state_dict() of a BatchLoader (version {_VERSION})")
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise ValueError(f"the state has {name} {state.get(name)!r}, this loader {own!r}. Fix: use the same")
        epoch, samples = state.get("epoch"), state.get("samples")
        if not isinstance(epoch, int) or not isinstance(samples, int) or epoch < 0 or not 0 <= samples <= self.total:
            raise ValueError(f"the state stands at epoch {epoch!r}, sample {samples!r} of {self.total}")
        self.epoch, self._begin, self._handed = epoch, samples, samples

    def set_epoch(self, epoch: int) -> None:
        """The next loop is this epoch, from its beginning.

        Raises:
            ValueError: a number below 0.
        """
        if not isinstance(epoch, int) or not 0 <= epoch < _MOST:
            raise ValueError(f"epoch must be an integer from 0, got {epoch!r}")
        self.epoch, self._begin, self._handed = epoch, 0, 0

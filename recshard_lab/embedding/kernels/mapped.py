"""The base of kernels with a map in front of an inner kernel: from the ids of a batch to rows of that kernel.

::

    dynamic/kernel.py               ids of any value -> slots of an index
    dynamic/cached.py               rows of a shard  -> slots of a cache
    managed_collision/kernel.py     ids of any value -> rows that they own

Ids that find no row, because a batch has more of them than there are rows, get *staging rows* behind the others. A map
that needs more rows gets a new inner kernel, also while batches wait for their backward.

Shape letters: N ids of a batch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recshard_lab.embedding.kernels.base import KernelInput, KernelSpec, LookupKernel, RowNorms


class Step:
    """A training batch whose backward is to come. While it exists, its ids keep their rows.

    Attributes:
        numbers: the step of each map.
    """

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


class Found(NamedTuple):
    """Where the rows of a batch are.

    Attributes:
        rows: ``[N]`` rows of the inner kernel.
        step: keeps them there. None after a lookup without backward.
        memory: the number of the inner kernel.
        staged: number of a map -> what it has in staging rows, if a pass must fill them.
    """

    rows: Tensor
    step: Step | None
    memory: int
    staged: Mapping[int, Any] = {}


@dataclass
class Saved:
    """What backward needs: the batch, its rows, and what the inner kernel needs. None: it is another kernel by now."""

    batch: KernelInput
    found: Found
    inner: Any

    def rows(self) -> KernelInput:
        """The batch of the inner kernel."""
        return self.batch._replace(ids=self.found.rows, prefetched=None)


class MappedKernel(LookupKernel):
    """A `LookupKernel` that maps the ids of its batches to rows of an inner kernel.

    `prefetch` may run in another thread than the other methods. The maps change under ``_lock``, and the inner kernel
    computes and is replaced under ``_in_use``. A thread that has only ``_in_use`` requests no other lock.

    Args:
        spec: as of `LookupKernel`.
        inner: the class of the inner kernel.
    """

    def __init__(self, spec: KernelSpec, inner: type[LookupKernel]) -> None:
        self._class, self.name = inner, inner.name  # type: ignore[misc]
        self._serve(spec)
        self._memory = 0
        self._start()
        self._build()
        self._bind()

    def _start(self) -> None:
        """What a copied kernel does not share with the original."""
        self._pending: weakref.WeakSet[Step] = weakref.WeakSet()
        self._lock, self._in_use = threading.RLock(), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_pending", "_lock", "_in_use")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()
        self._bind()  # unpickled tensors share no memory

    # ---- of each kind of map ----

    def _find(self, batch: KernelInput, train: bool, pins_last: bool = False) -> Found:
        """The rows of a batch. If ``train``, as one step of each map, in which ids may get rows.

        ``pins_last``: ids of the step before keep their rows, whether its backward has ended or not: so timing affects
        nothing.
        """
        raise NotImplementedError

    def _sizes(self) -> list[int]:
        """Rows of each shard in the inner kernel."""
        return [shard.num_rows for shard in self.shards]

    def _bind(self, moved: int | None = None) -> None:
        """Gives the maps the memory of the inner kernel, but not map ``moved``, which is about to move its rows."""

    def _refreshed(self, found: Found) -> Found:
        """A prefetched batch just before its lookup: rows may have changed since."""
        return found

    def _found_again(self, found: Found, batch: KernelInput) -> Found:
        """The same batch in the inner kernel of now."""
        return found._replace(memory=self._memory)

    def _before(self, found: Found, steps: bool) -> None:
        """Is called before each pass of the inner kernel. ``steps``: the pass is a backward."""

    def _after_step(self, found: Found) -> None:
        """Is called after each backward pass of the inner kernel."""

    # ---- the inner kernel ----

    def _build(self) -> None:
        shards = [replace(own, num_rows=size) for own, size in zip(self.shards, self._sizes(), strict=True)]
        self._inner = self._class(self.spec._replace(shards=shards, optimizer=self.optimizer))

    def _rebuild(self, moved: int | None = None) -> None:
        """A new inner kernel with more rows, and the rows of the one before. Those of map ``moved`` are left out."""
        with self._in_use:
            if self.device.type == "cuda":  # passes and prefetches may run on streams of which only the host knows
                torch.cuda.synchronize(self.device)
            before = [*zip(self._inner.weights(), self._inner.optimizer_states(), strict=True)]
            self._build()
            self._memory += 1
            after = zip(before, self._inner.weights(), self._inner.optimizer_states(), strict=True)
            for number, ((weight, states), larger, larger_states) in enumerate(after):
                if number != moved:
                    larger[: len(weight)] = weight
                    for name, state in states.items():
                        larger_states[name][: len(state)] = state
            self._bind(moved)

    def _spans(self, batch: KernelInput) -> list[tuple[int, int, int]]:
        """Of each shard feature its map, and where its ids begin and end."""
        return [(number, *span) for number, span in zip(self.features, batch.spans(), strict=True)]

    def _pinned(self, number: int) -> int | None:
        """The first step of a map whose backward is to come. None for none."""
        return min((step.numbers[number] for step in self._pending), default=None)

    def _begun(self, numbers: list[int]) -> Step:
        """A step with these numbers, whose ids keep their rows."""
        step = Step(numbers)
        self._pending.add(step)
        return step

    # ---- the two passes ----

    def prefetch(self, batch: KernelInput) -> Found | None:
        """As of `LookupKernel`. Ids get rows here."""
        return self._find(batch, train=True, pins_last=True)

    def forward(self, batch: KernelInput, train: bool) -> tuple[Tensor, Any]:
        """As of `LookupKernel`. If ``train``, ids may get rows first."""
        return self._pass(batch, train, lambda own: self._inner.forward(own, train))

    def remember(self, batch: KernelInput, train: bool = True) -> Any:
        """As of `LookupKernel`. If ``train``, ids may get rows."""
        return self._pass(batch, train, lambda own: (None, self._inner.remember(own)))[1]

    def _pass(
        self, batch: KernelInput, train: bool, run: Callable[[KernelInput], tuple[Any, Any]]
    ) -> tuple[Any, Saved]:
        found = batch.prefetched
        with nullcontext() if train or found is not None else self._lock:  # nothing else keeps the rows
            found = self._find(batch, train) if found is None else self._refreshed(found)
            saved = Saved(batch._replace(prefetched=None), found, None)
            while True:
                with self._in_use:
                    if saved.found.memory == self._memory:
                        self._before(saved.found, steps=False)
                        rows, saved.inner = run(saved.rows())
                        return rows, saved
                saved.found = self._found_again(saved.found, saved.batch)

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        """As of `LookupKernel`."""
        while True:
            with self._in_use:
                if saved.found.memory == self._memory:
                    self._before(saved.found, steps=True)
                    if saved.inner is None:
                        saved.inner = self._inner.remember(saved.rows())
                    of_weights = self._inner.backward(saved.inner, grad, row_norms)
                    self._after_step(saved.found)
                    break
            saved.found, saved.inner = self._found_again(saved.found, saved.batch), None
        saved.found = saved.found._replace(step=None)  # ids of this batch may now lose their rows
        return of_weights

    # ---- memory and settings of the inner kernel ----

    @classmethod
    def refuses(cls, spec: KernelSpec) -> str | None:
        """Nothing: the inner kernel was chosen for this."""
        return None

    def weights(self) -> list[Tensor]:
        """As of `LookupKernel`."""
        return self._inner.weights()

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """As of `LookupKernel`."""
        return self._inner.optimizer_states()

    def set_learning_rate(self, lr: float) -> None:
        """As of `LookupKernel`."""
        super().set_learning_rate(lr)
        self._inner.set_learning_rate(lr)

"""The ranks of a process group, such as those of torchrun, for `RankIndex`: the first rank calls, the others follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_IDLE = timedelta(days=365)  # followers wait this long for the next call


class GroupRanks:
    """Runs functions on the ranks of a process group. Creating it is collective.

    The group's rank 0 builds a `RankIndex` over it and searches. The other ranks call `follow`, which returns when rank
    0 calls `close` or leaves the context. A function that raises on a rank raises RuntimeError on rank 0.

    Args:
        pg: the process group. Default: all ranks.

    Raises:
        ValueError: no process group exists.

    ::

        # torchrun --nproc-per-node 2 search.py
        torch.distributed.init_process_group("gloo")
        ranks = GroupRanks()
        if ranks.is_first:
            with ranks:
                index = RankIndex.build(ranks, vectors, ids, ExactIndex)
                index.search(queries, 100)
        else:
            ranks.follow()
    """

    def __init__(self, pg: Any = None) -> None:
        if not dist.is_initialized():
            raise ValueError("no process group exists. Fix: start the script with torchrun and call init_process_group")
        members = dist.get_process_group_ranks(dist.group.WORLD if pg is None else pg)
        self.world_size, self._rank = len(members), members.index(dist.get_rank())
        self._pg: Any = dist.new_group(members, timeout=_IDLE, backend="gloo")
        self._first = members[0]
        self._closed = False

    @property
    def is_first(self) -> bool:
        """Whether this rank calls, so that it does not follow."""
        return self._rank == 0

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """``fn(*args)`` on some ranks, or on all. Only rank 0 calls this, one thread at a time.

        Raises:
            RuntimeError: the function raised on a rank, or this is not rank 0, or the ranks are released.
        """
        if not self.is_first or self._closed:
            why = "the ranks were released by close()" if self._closed else f"rank {self._rank} follows rank 0"
            raise RuntimeError(f"GroupRanks.call is not possible here: {why}. Fix: call it on rank 0, before close()")
        chosen = list(range(self.world_size)) if ranks is None else list(ranks)
        found = self._run((fn, tuple(args), chosen))
        for rank in chosen:
            if (error := found[rank][0]) is not None:
                raise RuntimeError(f"rank {rank}: {error}")
        return [found[rank][1] for rank in chosen]

    def follow(self) -> None:
        """Runs what rank 0 calls, until it releases the ranks.

        Raises:
            RuntimeError: rank 0 has ended, or this is rank 0.
        """
        if self.is_first:
            raise RuntimeError("rank 0 calls, it does not follow. Fix: call follow() on the other ranks")
        while not self._closed:
            self._run(None)

    def close(self) -> None:
        """Releases the other ranks: `follow` returns there. Calling it again does nothing."""
        if self.is_first and not self._closed:
            self._run((None, (), []))

    def __enter__(self) -> GroupRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, work: tuple[Callable[..., Any] | None, tuple[Any, ...], list[int]] | None) -> list[Any]:
        """Sends work from rank 0 to all, runs it where it is meant for, and returns each rank's result on rank 0."""
        box = [work]
        dist.broadcast_object_list(box, self._first, self._pg)
        assert box[0] is not None
        fn, args, chosen = box[0]
        if fn is None:
            self._closed = True
            return []
        own: tuple[str | None, Any] = (None, None)
        if self._rank in chosen:
            try:
                own = None, fn(*args)
            except Exception as error:
                own = f"{type(error).__name__}: {error}", None
        found: list[Any] | None = [None] * self.world_size if self.is_first else None
        dist.gather_object(own, found, self._first, self._pg)
        return found or []

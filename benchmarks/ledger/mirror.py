"""One process as one rank of many: a process group whose other ranks all have this rank's batch.

A rank's message to rank k depends on its batch and on k alone. Where all batches are equal, every rank therefore sends
this rank what this rank sends to itself: sizes, lengths and ids arrive as they would. Rows and gradients of another
shape arrive as zeros, which changes no count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

from benchmarks.ledger.counts import note_collective
from benchmarks.ledger.device import NAME, unwrap

BACKEND = "mirror"


class MirrorGroup(dist.ProcessGroup):
    """A process group of one process.

    Args:
        rank: of this process.
        size: ranks in all.

    Attributes:
        wall_s, cpu_s: seconds of all-to-alls in all groups; on a network that would be transfer time.
    """

    wall_s = cpu_s = 0.0
    group_name = BACKEND  # type: ignore[assignment]

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._own_rank, self._own_size = rank, size

    def size(self) -> int:
        """Ranks in all."""
        return self._own_size

    def getBackendName(self) -> str:
        """For torch's messages."""
        return BACKEND

    def _get_backend(self, device: Any) -> Any:
        """The group itself, which numbers no messages: nothing fails here."""
        return self

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Every rank sends what this rank sends to itself; zeros where that has another size."""
        wall, cpu, size = time.perf_counter(), time.thread_time(), self._own_size
        _count("all_to_all", tensor)
        sent, received = unwrap(tensor), unwrap(output)
        own = sent.split(list(input_splits) or [sent.shape[0] // size] * size)[self._own_rank]
        for part in received.split(list(output_splits) or [received.shape[0] // size] * size):
            if part.shape == own.shape:
                part.copy_(own)
            elif part.is_floating_point():
                part.zero_()
            else:
                raise ValueError(
                    f"a message of {part.numel()} integers cannot be mirrored: this rank sends itself {own.numel()}. "
                    f"Fix: give every rank the same batch and tables of one shape"
                )
        MirrorGroup.wall_s += time.perf_counter() - wall
        MirrorGroup.cpu_s += time.thread_time() - cpu
        return _done(output)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """A sum is the number of ranks times the tensor; a largest or smallest value is the tensor."""
        for tensor in tensors:
            _count("all_reduce", tensor)
            if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
                unwrap(tensor).mul_(self._own_size)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Leaves the tensors as they are."""
        for tensor in tensors:
            _count("broadcast", tensor)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """The tensor once a rank."""
        for parts, tensor in zip(outputs, tensors, strict=True):
            _count("all_gather", tensor)
            for part in parts:
                unwrap(part).copy_(unwrap(tensor))
        return _done(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """The tensor once a rank."""
        _count("all_gather", tensor)
        unwrap(output).view(self._own_size, -1).copy_(unwrap(tensor).reshape(1, -1))
        return _done(output)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """The number of ranks times this rank's part."""
        _count("reduce_scatter", tensor)
        part = unwrap(tensor).reshape(self._own_size, -1)[self._own_rank]
        unwrap(output).view(-1).copy_(part).mul_(self._own_size)
        return _done(output)

    def barrier(self, opts: Any = None) -> Any:
        """Returns at once."""
        return _done(None)


def _count(name: str, tensor: Tensor) -> None:
    note_collective(name, tensor.numel() * tensor.element_size())


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _create(store: Any, rank: int, size: int, timeout: Any) -> MirrorGroup:
    return MirrorGroup(rank, size)


@contextmanager
def mirrored_world(size: int, local_size: int | None = None, rank: int = 0) -> Iterator[None]:
    """Makes this process one rank of ``size``, ``local_size`` a node, in the default process group."""
    if BACKEND.upper() not in dir(dist.Backend):
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda", NAME])
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(local_size or size)):
        dist.init_process_group(BACKEND, rank=rank, world_size=size, store=HashStore())
        try:
            yield
        finally:
            dist.destroy_process_group()

"""The walk of a batch: the files and functions of the library that a step passes through, and how deep it calls them.

Kernels are not counted, as they differ by backend. The limits are what the code reached: a step may not grow again.
"""

import gc
import re
import sys
import weakref
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from recshard_lab.distributed import shard
from recshard_lab.sharding import row_wise, table_wise
from tests.distributed.failure_jobs import FAULT, failing, owner_of
from tests.distributed.jobs import attempted
from tests.distributed.step_failure_jobs import PLACES

TABLES, SAMPLES = 4, 8
KERNELS = "embedding/kernels"
PAGE = Path(__file__).parents[2] / "docs/concepts/batch.md"
ERRORS = ("ids", "ids' message", "ids' arrival", "lookup", "output", "message", "arrival", "kernel")
Counts = tuple[int, int, int, int]


class Walk:
    """Counts the calls of this thread: files, functions, the deepest stack of the library alone, calls."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}  # in the order of their first call; kernels are one
        self.functions: set[tuple[str, str]] = set()
        self.calls = self.depth = self.deepest = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        _, inside, file = code.co_filename.partition("/recshard_lab/")
        if not inside:
            return
        self.files.setdefault(KERNELS if file.startswith(KERNELS) else file)
        if file.startswith(KERNELS):
            return
        if event == "call":
            self.calls, self.depth = self.calls + 1, self.depth + 1
            self.deepest = max(self.deepest, self.depth)
            self.functions.add((code.co_filename, code.co_qualname))
        elif event == "return":
            self.depth -= 1

    def __enter__(self) -> "Walk":
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def counts(self) -> Counts:
        """Files, functions, depth, calls."""
        return len(self.files.keys() - {KERNELS}), len(self.functions), self.deepest, self.calls


def sharded() -> tuple[Any, KeyedJaggedTensor]:
    """Table-wise and row-wise tables, and a batch."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    names = [str(number) for number in range(TABLES)]
    tables = [EmbeddingBagConfig(name=t, num_embeddings=100, embedding_dim=16, feature_names=[t]) for t in names]
    plan = {t: table_wise(rank=int(t) % ranks) if t < "2" else row_wise() for t in names}
    lengths = torch.randint(0, 4, (TABLES * SAMPLES,), generator=torch.Generator().manual_seed(rank))
    batch = KeyedJaggedTensor(names, torch.arange(int(lengths.sum())) % 100, lengths=lengths)
    return shard(EmbeddingBagCollection(tables), plan), batch


def walk() -> tuple[Counts, Counts, list[str]]:
    """Of a warm step of table-wise and row-wise tables: its forward, its backward, and the files of both in order."""
    bags, batch = sharded()
    for _ in range(2):
        step(bags, batch)
    with Walk() as forward:
        rows = bags(batch).values()
    loss = rows.sum()
    with torch.autograd.set_multithreading_enabled(False), Walk() as backward:
        loss.backward()
    return forward.counts, backward.counts, list(forward.files | backward.files)


def within(found: Counts, limits: Counts) -> bool:
    return all(number <= limit for number, limit in zip(found, limits, strict=True))


def test_a_step_of_two_ranks_is_short(two: Any) -> None:
    forward, backward, files = two.call(walk)[0]
    assert within(forward, (22, 97, 13, 132)), forward
    assert within(backward, (11, 34, 8, 36)), backward
    assert re.findall(r"^- `(\S+?)`", PAGE.read_text(), re.M) == files


def test_a_step_of_one_rank_is_shorter() -> None:
    forward, backward, _ = walk()
    assert within(forward, (16, 54, 11, 63)), forward
    assert within(backward, (6, 17, 6, 19)), backward


def step(bags: Any, batch: KeyedJaggedTensor) -> None:
    bags(batch).values().sum().backward()


def stay_after_a_model(where: str) -> bool:
    """Whether kernels outlive their collection until Python looks for cycles: a second model may then not fit.

    Args:
        where: a function of the library that raises in another step, on rank 1 alone; empty for none.
    """
    bags, batch = sharded()
    step(bags, batch)
    if where:
        with failing(*owner_of(where), 1):
            raised = attempted(partial(step, bags, batch))
        assert FAULT in raised or dist.get_rank() == 0  # which hears of an error in backward with its next batch
    kernels = [weakref.ref(group.kernel) for group in bags.executor.lookup.groups]
    gc.disable()
    del bags
    stay = any(kernel() is not None for kernel in kernels)
    gc.enable()
    return stay


@pytest.mark.parametrize("where", ["", *map(PLACES.__getitem__, ERRORS)], ids=["no error", *ERRORS])
def test_the_memory_of_a_model_ends_with_it(two: Any, where: str) -> None:
    assert two.run(stay_after_a_model, where) == [False, False]

"""The walk of a batch: the files and functions of the library that a step passes through, and how deep it calls them.

Kernels are not counted, as they differ by backend. The limits are what the code reached: a step may not grow again.
"""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from recshard_lab.distributed import shard
from recshard_lab.sharding import row_wise, table_wise

TABLES, SAMPLES = 4, 8
KERNELS = "embedding/kernels"
PAGE = Path(__file__).parents[2] / "docs/concepts/batch.md"
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


def walk() -> tuple[Counts, Counts, list[str]]:
    """Of a warm step of table-wise and row-wise tables: its forward, its backward, and the files of both in order."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    names = [str(number) for number in range(TABLES)]
    tables = [EmbeddingBagConfig(name=t, num_embeddings=100, embedding_dim=16, feature_names=[t]) for t in names]
    plan = {t: table_wise(rank=int(t) % ranks) if t < "2" else row_wise() for t in names}
    bags = shard(EmbeddingBagCollection(tables), plan)
    lengths = torch.randint(0, 4, (TABLES * SAMPLES,), generator=torch.Generator().manual_seed(rank))
    batch = KeyedJaggedTensor(names, torch.arange(int(lengths.sum())) % 100, lengths=lengths)
    for _ in range(2):
        bags(batch).values().sum().backward()
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
    assert within(forward, (23, 114, 15, 167)), forward
    assert within(backward, (13, 44, 9, 47)), backward
    assert re.findall(r"^- `(\S+?)`", PAGE.read_text(), re.M) == files


def test_a_step_of_one_rank_is_shorter() -> None:
    forward, backward, _ = walk()
    assert within(forward, (15, 65, 12, 74)), forward
    assert within(backward, (6, 20, 7, 22)), backward

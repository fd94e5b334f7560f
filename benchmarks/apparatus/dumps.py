"""Speed and size of the dumps of a dynamic table on 2 ranks, and of loading them on 2 ranks and on one.

The table has 400,000 rows x 64 in FP32 with Adagrad's sums: 512 bytes a row. Rates count these bytes. A delta has the
1% of the rows that were touched since. Writing a file of as many bytes with fsync, and reading it, is timed before and
after. Files that were just written are read from memory, if the system caches them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

import recshard_lab
from benchmarks import Figure
from recshard_lab import (
    DistributedModelParallel,
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingConfig,
    KeyedJaggedTensor,
    ShardingPlan,
    row_wise,
)
from recshard_lab.sharding import construct_module_sharding_plan

ROWS, DIM, TOUCHED, BATCH, WORLD, ROUNDS = 400_000, 64, 0.01, 50_000, 2, 3
RAW = 2 * 4 * DIM


def sharded(rows: int) -> DistributedModelParallel:
    """The table without rows, split by rows over all ranks."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    table = DynamicEmbeddingConfig("user", DIM, capacity=int(rows / 0.8))
    module = DynamicEmbeddingBagCollection([table], torch.optim.Adagrad, {"lr": 0.1})
    plan = construct_module_sharding_plan(module, {"user": row_wise()}, world_size=world)
    return DistributedModelParallel(module, plan=ShardingPlan({"": plan}))


def _train(dmp: DistributedModelParallel, ids: torch.Tensor) -> None:
    """Looks up the ids and steps their rows; each rank has a part of them."""
    for part in ids.split(BATCH):
        batch = KeyedJaggedTensor(["user"], part, lengths=torch.ones(len(part), dtype=torch.int64))
        dmp(batch).values().sum().backward()


def _seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = action()
    return time.perf_counter() - begun, result


def dumped(folder: str, rows: int) -> dict[str, float]:
    """Trains, dumps and loads on the launched ranks. Seconds of this rank, and bytes."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dmp, other = sharded(rows), sharded(rows)
    ids = torch.arange(rank, rows, world) * 1_000_003
    _train(dmp, ids)
    taken: dict[str, list[float]] = {name: [] for name in ("full", "delta", "load")}
    found = {}
    for number in range(ROUNDS):
        path = f"{folder}/full{number}"
        seconds, full = _seconds(partial(dmp.dump, path))
        taken["full"].append(seconds)
        _train(dmp, ids[: int(TOUCHED * len(ids))])
        seconds, delta = _seconds(partial(dmp.dump, f"{folder}/delta{number}", since=path))
        taken["delta"].append(seconds)
        taken["load"].append(_seconds(partial(other.load, path))[0])
        found = {"full bytes": full.bytes, "delta bytes": delta.bytes, "delta rows": delta.rows["user"]}
        assert full.rows["user"] == rows
    return {name: median(times) for name, times in taken.items()} | found


def loaded(folder: str, rows: int) -> float:
    """Seconds to load the dump on these ranks."""
    dmp = sharded(rows)
    return median(_seconds(partial(dmp.load, f"{folder}/full{number}"))[0] for number in range(ROUNDS))


def plain(folder: Path, many: int) -> tuple[float, float]:
    """Seconds to write and to read a file of so many bytes."""
    data, path = os.urandom(1 << 20) * (many >> 20), folder / "plain"

    def write() -> None:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    written, (read, _) = _seconds(write)[0], _seconds(path.read_bytes)
    path.unlink()
    return written, read


def dump_figures(rows: int = ROWS) -> Iterator[Figure]:
    """Rates in MB/s of weights and optimizer states, with the bytes of a row on disk."""
    with TemporaryDirectory() as folder:
        with recshard_lab.launch(WORLD) as ranks:
            before = plain(Path(folder), RAW * rows)
            by_rank = ranks.run(dumped, folder, rows)
            after = plain(Path(folder), RAW * rows)
        found = {name: max(rank[name] for rank in by_rank) for name in by_rank[0]}
        one = loaded(folder, rows)
    file = {"write": median(each[0] for each in (before, after)), "read": median(each[1] for each in (before, after))}
    megabytes, touched = RAW * rows / 1e6, found["delta rows"]

    def figure(name: str, amount: float, seconds: float, beside: dict[str, float]) -> Figure:
        return Figure(name, amount / seconds, "MB/s", at_most=False, beside={"s": seconds} | beside)

    sizes = {"bytes a row": found["full bytes"] / rows, "raw bytes a row": float(RAW)}
    written, read = ({f"file MB/s ({name})": megabytes / file[name]} for name in ("write", "read"))
    name = f"{rows:,} rows x {DIM}, Adagrad"
    yield figure(f"full dump on {WORLD} ranks, {name}", megabytes, found["full"], sizes | written)
    sizes = {"bytes a row": found["delta bytes"] / touched, "raw bytes a row": float(RAW)}
    yield figure(f"delta of {touched:,.0f} rows on {WORLD} ranks", touched * RAW / 1e6, found["delta"], sizes)
    yield figure(f"load on {WORLD} ranks, {name}", megabytes, found["load"], read)
    yield figure(f"load on 1 rank, {name}", megabytes, one, read)

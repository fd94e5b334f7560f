"""Checkpoints of 2 ranks: saved row-wise, loaded column-wise, beside the disk alone; and pretrained tables."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import Figure

TABLES, ROWS, DIM, RANKS, ROUNDS = 4, 200_000, 64, 2, 3


def figures() -> list[Figure]:
    """All in turn in the same ranks and rounds; the disk alone is each rank's share written and made safe (fsync)."""
    from recshard_lab.launcher import launch

    with launch(RANKS) as ranks, tempfile.TemporaryDirectory() as folder:
        runs = ranks.run(_measure, folder)
    size = sum(run["bytes"][0] for run in runs) / 1e6

    def speed(what: str) -> float:
        return size / median(max(each) for each in zip(*(run[what] for run in runs), strict=True))

    def peak(what: str) -> float:
        return max(max(run[what]) for run in runs) / 1e6

    return [
        Figure(f"weights and row-wise states, {TABLES} tables x {ROWS:,} x {DIM} on {RANKS} ranks", size, "MB"),
        Figure("the disk alone", speed("disk"), "MB/s"),
        Figure("saved, row-wise", speed("save"), "MB/s"),
        Figure("copied by an asynchronous save, row-wise; then the training continues", speed("async"), "MB/s"),
        Figure("loaded, column-wise", speed("load"), "MB/s"),
        Figure("pretrained tables from .npy files, column-wise", speed("pretrained"), "MB/s"),
        Figure("extra memory on a rank: saving", peak("save_peak"), "MB"),
        Figure("extra memory on a rank: asynchronous save", peak("async_peak"), "MB"),
        Figure("extra memory on a rank: loading", peak("load_peak"), "MB"),
        Figure("extra memory on a rank: pretrained", peak("pretrained_peak"), "MB"),
    ]


def _measure(folder: str) -> dict[str, list[float]]:
    """Seconds of each round but the first, and the growth of anonymous memory in bytes."""
    import numpy as np

    from recshard_lab import (
        DistributedModelParallel,
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        column_wise,
        load_checkpoint,
        row_wise,
        save_checkpoint,
    )
    from recshard_lab.distributed import EmbeddingBagCollectionSharder, async_save_checkpoint, load_pretrained
    from recshard_lab.sharding import ShardingPlan, construct_module_sharding_plan

    def sharded(scheme: Callable[[], Any]) -> DistributedModelParallel:
        model = EmbeddingBagCollection(tables=configs, device="meta")
        plan = construct_module_sharding_plan(model, {config.name: scheme() for config in configs}, world_size=RANKS)
        sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": "exact_row_wise_adagrad"})
        return DistributedModelParallel(model, plan=ShardingPlan({"": plan}), sharders=[sharder])

    configs = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{n}"])
        for n in range(TABLES)
    ]
    rank = torch.distributed.get_rank()
    path, table = Path(folder) / "run", Path(folder) / "table.npy"
    if rank == 0:
        np.save(table, np.ones((ROWS, DIM), np.float32))
    source, target = sharded(row_wise), sharded(column_wise)
    held = source.memory_bytes()
    size = held["weights"] + held["optimizer_state"] + held.get("index", 0)
    samples: dict[str, list[float]] = {"bytes": [size]}
    actions: dict[str, Callable[[], Any]] = {
        "disk": lambda: _write(Path(folder) / f"alone{rank}", size),
        "save": lambda: save_checkpoint(path, source),
        "async": lambda: async_save_checkpoint(path, source),
        "load": lambda: load_checkpoint(path, target),
        "pretrained": lambda: load_pretrained(target, {config.name: table for config in configs}),
    }
    for number in range(1 + ROUNDS):
        for name, action in actions.items():
            torch.distributed.barrier()
            before, sampler = _anonymous(), _Sampler()
            sampler.start()
            begun = time.perf_counter()
            pending = action()
            seconds = time.perf_counter() - begun
            if name == "async":
                pending.result()
            sampler.over.set()
            sampler.join()
            if number:
                samples.setdefault(name, []).append(seconds)
                samples.setdefault(f"{name}_peak", []).append(max(0, sampler.peak - before))
    return samples


def _write(path: Path, size: int) -> None:
    data = bytes(2**22)
    with path.open("wb") as file:
        for start in range(0, size, len(data)):
            file.write(data[: size - start])
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def _anonymous() -> int:
    """Bytes of this process that no file backs (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


class _Sampler(threading.Thread):
    """The largest anonymous memory of this process while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.005):
            self.peak = max(self.peak, _anonymous())

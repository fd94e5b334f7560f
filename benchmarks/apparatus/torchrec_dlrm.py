"""Counts and times what TorchRec's DLRM example does on the host in a step; runs in TorchRec's environment.

``python -m benchmarks.apparatus.torchrec_dlrm`` prints one JSON object: the dense part's launches in a step of
``torchrec_dlrm/dlrm_main.py``, and ms in which its loader makes a batch, by batch size. ``published.json`` holds them.
The example's runs were made with torch before 2.0, whose optimizer zeroed and stepped each parameter by an operator of
its own. Its loader (``--in_memory_binary_criteo_path --shuffle_batches --pin_memory``) runs on the training thread.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.apparatus.operators import OperatorCount

TABLES, DIM, NUMBERS = 26, 128, 13
BOTTOM, TOP = [512, 256, DIM], [1024, 1024, 512, 256, 1]
BATCHES, ROWS, TIMED = (256, 2048, 4096, 8192), 400_000, 40


class Dense(nn.Module):
    """The layers of TorchRec's DLRM around its tables, with its loss."""

    def __init__(self) -> None:
        from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

        super().__init__()
        self.bottom, self.cross = DenseArch(NUMBERS, BOTTOM), InteractionArch(TABLES)
        self.top, self.loss = OverArch(DIM + TABLES * (TABLES + 1) // 2, TOP), nn.BCEWithLogitsLoss()

    def forward(self, numbers: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss, of rows ``[B, TABLES * DIM]``."""
        pooled = rows.view(-1, TABLES, DIM)
        found: torch.Tensor = self.loss(self.top(self.cross(self.bottom(numbers), pooled)).squeeze(-1), labels.float())
        return found


def dense_launches(batch: int = 4) -> int:
    """Operators of the dense part in a step: forward, loss, backward into DDP's buckets, zeroed and stepped weights."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = DistributedDataParallel(Dense(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    given = torch.rand(batch, NUMBERS), torch.rand(batch, TABLES * DIM, requires_grad=True), torch.ones(batch)
    for _ in range(3):  # later steps have gradients to zero, and DDP's final buckets
        count = OperatorCount()
        with count:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            model(*given).backward()
            optimizer.step()
    dist.destroy_process_group()
    return sum(calls for name, calls in count.launches.items() if not name.startswith("allreduce"))


def load_ms(batch: int, folder: Path) -> float:
    """ms of the training thread for a batch: the loader's, and a copy of each tensor, as pinning makes one."""
    from torch.utils.data import DataLoader
    from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

    files = []
    for name, columns, kind in (("dense", NUMBERS, np.float32), ("sparse", TABLES, np.int32), ("labels", 1, np.int32)):
        files.append([str(folder / f"{name}.npy")])
        np.save(files[-1][0], np.random.default_rng(0).integers(0, 1000, (ROWS, columns)).astype(kind))
    settings: dict[str, Any] = {"batch_size": batch, "rank": 0, "world_size": 1, "shuffle_batches": True}
    pipe = InMemoryBinaryCriteoIterDataPipe("train", *files, **settings)
    batches, spent = iter(DataLoader(pipe, batch_size=None, collate_fn=lambda one: one)), []
    for _ in range(TIMED):
        begun, one = time.thread_time(), next(batches)
        ids = one.sparse_features
        for held in (one.dense_features, ids.values(), ids.lengths(), ids.offsets(), one.labels):
            held.clone()
        spent.append(time.thread_time() - begun)
    return 1e3 * sorted(spent)[TIMED // 4]  # a quarter of the batches were faster: less of other programs in it


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        loads = {str(batch): round(load_ms(batch, Path(made)), 2) for batch in BATCHES}
    print(json.dumps({"dense_launches": dense_launches(), "load_ms": loads}))

"""A rank that trains on orders, one JSON object a line, and answers each with one; the same program for both sides.

::

    {"do": "build", "case": {...}}                                  {"ok": true} or {"error": "..."}
    {"do": "steps", "kind": "plain", "count": 10}                   {"seconds": 0.21}
    {"do": "steps", "kind": "TrainPipelineSparseDist", "count": 10}
    {"do": "stages", "count": 10}                                   {"copy": 0.1, "dist": 2.3}
    {"do": "hidden", "kind": "TrainPipelineSparseDist"}             {"hidden": 0.9}
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.apparatus.train_case import from_dict


class TrainWorker:
    """Holds one model at a time."""

    def __init__(self, side: str, rank: int) -> None:
        self.side, self.rank = side, rank
        self.held: Any = None

    def build(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """A new model in the place of the old one."""
        if self.side == "theirs":
            from benchmarks.apparatus.train_theirs import Theirs as Held
        else:
            from benchmarks.apparatus.train_ours import Ours as Held  # type: ignore[assignment]
        for pipeline, _ in getattr(self.held, "pipelines", {}).values():
            getattr(pipeline, "close", lambda: None)()
        self.held = None
        gc.collect()
        torch.manual_seed(0)
        self.held = Held(from_dict(told["case"]), self.rank)
        return {"ok": True}

    def steps(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Steps in a row, timed from a barrier on."""
        dist.barrier()
        begun = time.perf_counter()
        if told["kind"] == "plain":
            self.held.plain(told["count"])
        else:
            self.held.piped(told["kind"], told["count"])
        return {"seconds": time.perf_counter() - begun}

    def stages(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """What parts of a step take on their own."""
        found: dict[str, Any] = self.held.stages(told["count"])
        return found

    def hidden(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """What a pipeline hid."""
        return {"hidden": self.held.hidden(told["kind"])}


def main(side: str, rank: int, ranks: int, store: str) -> None:
    """Joins the others and serves until its input ends."""
    wire = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    worker = TrainWorker(side, rank)
    orders = {"build": worker.build, "steps": worker.steps, "stages": worker.stages, "hidden": worker.hidden}
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = orders[told["do"]](told)
        except Exception as error:
            text = str(error).strip().splitlines()
            answer = {"error": f"{type(error).__name__}: {text[0] if text else ''}"}
            if os.environ.get("RECSHARD_BENCH_TRACE"):
                raise
        wire.write(json.dumps(answer) + "\n")
    os._exit(0)  # neither library's teardown is measured


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

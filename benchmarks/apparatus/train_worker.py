"""A rank that trains as it is ordered to (``orders.py``); the same program for both sides.

::

    {"do": "build", "case": {...}}                                  {"ok": true} or {"error": "..."}
    {"do": "steps", "kind": "plain", "count": 10}                   {"seconds": 0.21}
    {"do": "steps", "kind": "TrainPipelineSparseDist", "count": 10}
    {"do": "stages", "count": 10}                                   {"copy": 0.1, "dist": 2.3}
    {"do": "hidden", "kind": "TrainPipelineSparseDist"}             {"hidden": 0.9}
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.apparatus.orders import serve
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


if __name__ == "__main__":
    serve(TrainWorker)

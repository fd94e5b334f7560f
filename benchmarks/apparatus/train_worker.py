"""A rank that trains on orders (``orders.py``); the same program for both sides.

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

    def build(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Replaces the model."""
        if self.side == "theirs":
            from benchmarks.apparatus.train_theirs import Theirs as Held
        else:
            from benchmarks.apparatus.train_ours import Ours as Held  # type: ignore[assignment]
        for pipeline, _ in getattr(self.held, "pipelines", {}).values():
            getattr(pipeline, "close", lambda: None)()
        self.held = None
        gc.collect()
        torch.manual_seed(0)
        self.held = Held(from_dict(order["case"]), self.rank)
        return {"ok": True}

    def steps(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Steps in a row, timed from a barrier on."""
        dist.barrier()
        begun = time.perf_counter()
        if order["kind"] == "plain":
            self.held.plain(order["count"])
        else:
            self.held.piped(order["kind"], order["count"])
        return {"seconds": time.perf_counter() - begun}

    def stages(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Times of the parts of a step, measured alone."""
        found: dict[str, Any] = self.held.stages(order["count"])
        return found

    def hidden(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The share of input_dist that a pipeline hides."""
        return {"hidden": self.held.hidden(order["kind"])}


if __name__ == "__main__":
    serve(TrainWorker)

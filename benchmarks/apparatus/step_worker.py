"""A rank that runs steps on orders (``orders.py``); the same program for both sides.

::

    {"do": "build", "case": {...}, "rectangles": {...}}     {"ok": true} or {"error": "..."}
    {"do": "steps", "count": 10}                            {"seconds": 0.21}
    {"do": "operators"}                                     {"forward": 80, "backward": 40, "step": 0}
    {"do": "train", "count": 50, "out": "weights.npz"}      {"ok": true}
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.apparatus.orders import serve
from benchmarks.apparatus.step_case import StepCase, from_dict

BATCHES = 4
LEARNING_RATE = 0.01
PARITY_LEARNING_RATE = 0.1
EPS, PARITY_EPS = 1e-8, 1e-3  # the larger one, so that rounding in gradients that cancel is not blown up to a step


class Worker:
    """Holds one model at a time."""

    def __init__(self, side: Callable[..., Any], rank: int) -> None:
        self.side, self.rank = side, rank
        self.model: Any = None
        self.batches: list[Any] = []
        self.done = 0

    def build(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Replaces the model and its batches."""
        self.model, self.batches, self.done = None, [], 0
        gc.collect()
        case = from_dict(order["case"])
        if order.get("backend") == "ledger":
            import_module("benchmarks.ledger").register()
        torch.set_num_threads(case.threads)
        weights = case.first_weights() if order.get("comparing") else None
        numbers = (PARITY_LEARNING_RATE, PARITY_EPS) if order.get("comparing") else (LEARNING_RATE, EPS)
        torch.manual_seed(0)
        self.model = self.side(case, weights, *numbers, order["rectangles"], order.get("backend"))
        lengths = torch.full((case.tables * case.batch,), case.pooling, dtype=torch.long)
        for number in range(BATCHES):
            self.batches.append(self.model.batch(torch.from_numpy(case.bag_ids(self.rank, number)), lengths))
        self.target = target_of(case, self.rank)
        return {"ok": True}

    def steps(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Steps in a row, timed from a barrier on; no dense part: backward starts from a fixed gradient."""
        if dist.is_initialized():
            dist.barrier()
        begun = time.perf_counter()
        for _ in range(order["count"]):
            out = self.model.forward(self.batches[self.done % BATCHES])
            out.backward(self.target)
            self.model.step()
            self.done += 1
        return {"seconds": time.perf_counter() - begun}

    def operators(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Operators that one step dispatches, a lookup kernel counted as one forward and one backward."""
        from benchmarks.apparatus.operators import OperatorCount

        case = self.model.case
        lengths = torch.full((case.tables * case.batch,), case.pooling, dtype=torch.long)
        batch = self.model.batch(torch.from_numpy(case.bag_ids(self.rank, 0)), lengths)  # nothing of it is cached
        counts = {name: OperatorCount() for name in ("forward", "backward", "step")}
        with self.model.lookups_as_operators():
            with counts["forward"]:
                out = self.model.forward(batch)
            with counts["backward"]:
                out.backward(self.target)
        with counts["step"]:
            self.model.step()
        return {name: count.total() for name, count in counts.items()}

    def train(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Steps towards a target, features in order; then this rank's part of the weights into a file."""
        for number in range(order["count"]):
            out = self.model.forward(self.batches[number % BATCHES], ordered=True)
            out.backward((out.detach() - self.target) / len(self.target))
            self.model.step()
        pieces = {f"{name} {row} {col}": value.detach().numpy() for name, row, col, value in self.model.pieces()}
        np.savez(order["out"] + f".{self.rank}.npz", **pieces)
        return {"ok": True}


def target_of(case: StepCase, rank: int) -> torch.Tensor:
    """The target of training steps, and the fixed gradient of timed ones: [B, tables * dim]."""
    draw = np.random.default_rng([11, rank])
    return torch.from_numpy(draw.normal(0, 1, (case.batch, case.tables * case.dim)).astype(np.float32))


def _worker(side: str, rank: int) -> Worker:
    if side == "theirs":
        from benchmarks.apparatus.step_theirs import Theirs as Side
    else:
        from benchmarks.apparatus.step_ours import Ours as Side  # type: ignore[assignment]
    return Worker(Side, rank)


if __name__ == "__main__":
    serve(_worker)

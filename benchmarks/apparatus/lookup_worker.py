"""A process that looks up rows on orders (``orders.py``); the same program for this library and for TorchRec.

::

    {"do": "build", "kind": "int8", "tables": 26, "rows": 100000, "dim": 64, "pooling": 10}     {"bytes": 176800000}
    {"do": "times", "batch": 64, "count": 10}                                               {"seconds": [0.0003, ...]}

Kinds are "fp32" and "fused fp32", the training collections, "int8" and "int4". Ids are uniform, the same on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.apparatus.orders import serve

_TYPES = {"int8": torch.qint8, "int4": torch.quint4x2}


class LookupWorker:
    """Has one collection at a time."""

    def __init__(self, side: str, rank: int) -> None:
        self.side = side
        self.module: Any = None
        self.features: list[str] = []
        self.rows, self.pooling = 1, 1
        self.batches: dict[int, list[Any]] = {}

    def build(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Replaces the collection."""
        self.module, self.batches = None, {}
        self.rows, self.pooling = order["rows"], order["pooling"]
        self.features = [f"f{number}" for number in range(order["tables"])]
        torch.manual_seed(0)
        make = self._theirs if self.side == "theirs" else self._ours
        self.module = make(order["kind"], order["dim"])
        bytes_ = sum(one.numel() * one.element_size() for one in self.module.state_dict().values())
        return {"bytes": bytes_}

    def _ours(self, kind: str, dim: int) -> Any:
        from recshard_lab.embedding import (
            EmbeddingBagCollection,
            EmbeddingBagConfig,
            FusedEmbeddingBagCollection,
            quantize_embeddings,
        )

        tables = [EmbeddingBagConfig(self.rows, dim, f"t{one}", feature_names=[one]) for one in self.features]
        if kind == "fused fp32":
            return FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.1}).eval()
        trained = EmbeddingBagCollection(tables)
        return trained.eval() if kind == "fp32" else quantize_embeddings(trained, _TYPES[kind])

    def _theirs(self, kind: str, dim: int) -> Any:
        from benchmarks.apparatus.lookup_theirs import collection

        return collection(self.features, self.rows, dim, _TYPES.get(kind))

    def _batch(self, ids: Tensor, lengths: Tensor) -> Any:
        if self.side == "theirs":
            from benchmarks.apparatus.lookup_theirs import batch

            return batch(self.features, ids, lengths)
        from recshard_lab.sparse import KeyedJaggedTensor

        return KeyedJaggedTensor(self.features, ids, lengths=lengths)

    @torch.inference_mode()
    def times(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Seconds of single calls, each with another batch than the call before, from ids to the result's tensor."""
        batch, features = order["batch"], len(self.features)
        if batch not in self.batches:
            draw = torch.Generator().manual_seed(batch)
            self.batches[batch] = [
                (
                    torch.randint(self.rows, (features * batch * self.pooling,), generator=draw),
                    torch.full((features * batch,), self.pooling, dtype=torch.int64),
                )
                for _ in range(8)
            ]
        seconds = []
        for number in range(order["count"]):
            ids, lengths = self.batches[batch][number % 8]
            begun = time.perf_counter()
            self.module(self._batch(ids, lengths)).values()
            seconds.append(time.perf_counter() - begun)
        return {"seconds": seconds}


if __name__ == "__main__":
    serve(LookupWorker)

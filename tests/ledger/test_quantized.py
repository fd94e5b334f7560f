"""Lookups in quantized tables on a device: batches whose lengths the host has, and policies that do not raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import recshard_lab as rl
from recshard_lab import DataType, KeyedJaggedTensor, PoolingType
from recshard_lab.embedding import QuantEmbeddingBagCollection, QuantEmbeddingCollection
from tests.ledger.jobs import counted

FORMATS = [DataType.INT8, DataType.INT4, DataType.INT8]  # of two formats, so native kernels have two groups


def served(kind: str, policy: str) -> Any:
    """Three tables of 5 rows."""
    torch.manual_seed(0)
    rows, bags = [torch.randn(5, 8) for _ in FORMATS], kind != "sequence"
    config: Any = rl.EmbeddingBagConfig if bags else rl.EmbeddingConfig
    tables = [config(5, 8, f"t{n}", form, [f"f{n}"]) for n, form in enumerate(FORMATS)]
    if kind == "mean":
        tables[0].pooling = PoolingType.MEAN
    which: Any = QuantEmbeddingBagCollection if bags else QuantEmbeddingCollection
    found = which(tables, out_of_range=policy, **({"is_weighted": kind == "weighted"} if bags else {}))
    for number, own in enumerate(rows):
        found.load_packed(f"t{number}", own)
    return found


def batch(kind: str) -> KeyedJaggedTensor:
    """Two samples; the ids 7 and -2 of f0 and 5 of f2 are not rows. Features in another order than the tables."""
    ids, lengths = torch.tensor([1, 5, 4, 7, 0, -2, 3, 2]), torch.tensor([1, 2, 2, 1, 2, 0])
    weights = torch.linspace(0.5, 2, 8) if kind == "weighted" else None
    return KeyedJaggedTensor(["f2", "f0", "f1"], ids, weights, lengths=lengths)


def plain(output: Any) -> list[torch.Tensor]:
    if isinstance(output, dict):
        return [part.values().cpu() for part in output.values()]
    return [output.values().cpu()]


def looked_up(room: Any, kind: str, policy: str) -> tuple[list[str], list[torch.Tensor], int]:
    """Waits of the second call on the device, its result, and how many ids were out of range in both."""
    collection, own = served(kind, policy).to("ledger"), batch(kind).to("ledger")
    collection(own)
    with room.record() as counts:
        output = collection(own)
    return [str(sync) for sync in counts.syncs], plain(output), collection.out_of_range_count()


@pytest.mark.gate
@pytest.mark.parametrize("kind", ["pooled", "mean", "weighted", "sequence"])
@pytest.mark.parametrize("policy", ["clamp", "ignore"])
def test_the_host_waits_for_nothing(one_rank: Any, policy: str, kind: str) -> None:
    def call(room: Any) -> Any:
        return looked_up(room, kind, policy)

    ((_, (waits, output, outside)),) = one_rank.run(counted, call)
    collection = served(kind, policy)
    torch.testing.assert_close(output, plain(collection(batch(kind))))
    assert waits == []
    assert (outside, collection.out_of_range_count()) == (6, 3)

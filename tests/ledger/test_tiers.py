"""Dynamic tables with tiers whose fast tier is on a device, beside the same on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recshard_lab import DynamicEmbeddingBagCollection, DynamicEmbeddingConfig, KeyedJaggedTensor
from recshard_lab.embedding import Tier
from tests.ledger.jobs import register

Fixed = dict[str, Any]


def trained(path: str, device: str) -> tuple[list[float], Fixed, Fixed]:
    """Differences of outputs, and what both hold and have counted."""
    register(device)

    def made(place: str) -> DynamicEmbeddingBagCollection:
        tiers = [Tier("host", capacity=128, mode="cache"), Tier("disk", path=Path(path, place))]
        config = DynamicEmbeddingConfig("t", 8, 128, feature_names=["f"], evict="lfu", tiers=tiers)
        return DynamicEmbeddingBagCollection([config], torch.optim.Adagrad, {"lr": 0.1}, device=place)

    differences, both = [], (made("cpu"), made(device))
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        ids = torch.randint(0, 300, (90,), generator=generator)
        batch = KeyedJaggedTensor(["f"], ids, lengths=torch.full((30,), 3))
        outputs = []
        for collection in both:
            collection.train(step < 5)
            outputs.append(collection(batch.to(collection.device)).values())
            if step < 5:
                outputs[-1].pow(2).sum().backward()
        differences.append((outputs[0] - outputs[1].cpu()).abs().max().item())
    held = []
    for collection in both:
        table, ones = collection.table("t"), torch.ones(5, 8, device=collection.device)
        ids = torch.arange(5, device=collection.device)
        table.insert_and_evict(ids[:2], ones[:2])
        table.assign(ids, ones)
        table.accum_or_assign(ids, ones, torch.ones(5, dtype=torch.bool, device=collection.device))
        erased = table.erase(ids[1:3]) + table.erase_if(lambda own, scores: own % 5 == 4)
        rows = list(table.export_batches())
        weights = {
            int(id): row for part in rows for id, row in zip(part.ids.tolist(), part.weight.tolist(), strict=True)
        }
        table.flush()
        held.append({"erased": erased, "weights": weights, "counters": collection.counters(), "size": table.total_size})
    return differences, *held  # type: ignore[return-value]


@pytest.mark.gate
def test_rows_move_between_a_device_and_the_tiers(one_rank: Any, tmp_path: Path) -> None:
    ((differences, cpu, device),) = one_rank.run(trained, str(tmp_path), "ledger")
    assert max(differences) == 0.0
    assert cpu == device
    assert cpu["weights"][0] == [2.0] * 8
    assert all(cpu["counters"]["t"][tier]["hits"] > 0 for tier in ("fast", "host", "disk"))

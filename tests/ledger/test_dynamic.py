"""Dynamic tables on a device train as on the CPU, and the host waits for the device a stated number of times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import ledger
from recshard_lab.distributed import DistributedModelParallel
from recshard_lab.embedding import DynamicEmbeddingBagCollection, DynamicEmbeddingConfig, EmbOptimType
from recshard_lab.sharding import ShardingPlan, construct_module_sharding_plan, row_wise, table_wise
from recshard_lab.sparse import KeyedJaggedTensor
from tests.ledger.jobs import register

OPTIMIZER: Any = (EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"lr": 0.1})
BATCH, POOLING, STEPS = 12, 15, 4


def collection(tables: int, device: str) -> DynamicEmbeddingBagCollection:
    """Tables of 512 rows, of which batches have more ids."""
    evict = ("lru", "lfu", "epoch_lfu", lambda ids: ids.abs())
    configs = [
        DynamicEmbeddingConfig(f"t{i}", 8, 512, feature_names=[f"f{i}"], evict=evict[i % 4], seed=i)
        for i in range(tables)
    ]
    return DynamicEmbeddingBagCollection(configs, *OPTIMIZER, device=device)


def batches(tables: int, count: int, seed: int = 0) -> list[KeyedJaggedTensor]:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.full((tables * BATCH,), POOLING)
    ids = [torch.randint(0, 1000, (int(lengths.sum()),), generator=rng) * 7919 for _ in range(count)]
    return [KeyedJaggedTensor([f"f{i}" for i in range(tables)], own, lengths=lengths) for own in ids]


def trained(module: Any, device: str, data: list[KeyedJaggedTensor]) -> list[Tensor]:
    """The outputs of each step."""
    outputs = []
    for batch in data:
        out = module(batch.to(device)).values()
        outputs.append(out.detach().cpu())
        out.pow(2).sum().backward()
    return outputs


def waits(tables: int) -> tuple[int, int]:
    """How often the host waits in a step whose ids all have rows, and in one with new ids in each table."""
    register("ledger")
    module = collection(tables, "ledger")
    known, new = batches(tables, 1), batches(tables, 1, seed=1)
    trained(module, "ledger", known)
    found = []
    for data in (known, new):
        with ledger.record() as counts:
            out = module(data[0].to("ledger")).values()
            out.sum().backward()
        found.append(len(counts.reads))
    return found[0], found[1]


@pytest.mark.gate
@pytest.mark.parametrize("device", ["ledger"], scope="module", indirect=True)
@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_a_step_without_new_ids_waits_once_for_any_number_of_tables(ranks: Any, device: str) -> None:
    found = {tables: ranks.run(waits, tables)[0] for tables in (1, 3)}
    assert {tables: known for tables, (known, _) in found.items()} == {1: 1, 3: 1}
    # a table: distinct new ids, how many got slots, and one for 16 of about 40 rounds of insertions
    assert all(1 < new <= 2 + 6 * tables for tables, (_, new) in found.items()), found


def sharded(device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of a row-wise and a table-wise table on the device and on the CPU."""
    register(device)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = []
    for place in (device, "cpu"):
        module = collection(2, place)
        partitions = module.tables()["t0"].config.partitions
        chosen = {"t0": row_wise(num_buckets=partitions), "t1": table_wise(world - 1)}
        plan = ShardingPlan({"": construct_module_sharding_plan(module, chosen, world_size=world)})
        dmp = DistributedModelParallel(module, device=place, plan=plan)
        found.append(trained(dmp, place, batches(2, 2, seed=rank)))
    return found[0], found[1]


@pytest.mark.gate
def test_sharded_tables_train_on_a_device_as_on_the_cpu(ranks: Any, device: str) -> None:
    for on_device, on_cpu in ranks.run(sharded, device):
        torch.testing.assert_close(on_device, on_cpu, rtol=1e-5, atol=1e-6)
        assert float(on_cpu[-1].abs().max()) > 0

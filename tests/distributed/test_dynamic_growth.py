"""Sharded dynamic tables that grow: beside the unsharded collection, and through checkpoints, moves and dumps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from recshard_lab import DistributedModelParallel
from recshard_lab.distributed.state.checkpoint import load_checkpoint, save_checkpoint
from tests.distributed.cached_jobs import world
from tests.distributed.test_dynamic import batch_of, batches, collection, compared, index_of, plan_of

pytestmark = pytest.mark.gate

MOST = 4096  # rows, from 1,024 ("user") and 2,048 ("item")


def both(optimizer: str, scheme: str, **more: Any) -> tuple[Any, Any]:
    """The unsharded collection and the sharded one."""
    reference, module = (collection("pooled", optimizer, max_capacity=MOST, **more) for _ in range(2))
    return reference, DistributedModelParallel(module, plan=plan_of(module, scheme))


def slots(dmp: Any, table: str = "user") -> int:
    """Rows in the memory of this rank's shards."""
    return sum(len(weight) for weight in dmp.module.table_shards()[table].local_weights.values())


def assert_views(dmp: Any) -> None:
    """Parameters are the memory of the kernels, and as large as their index."""
    for group in dmp.module.executor.lookup.groups:
        for (number, position), weight, table in zip(
            group.shards, group.kernel.weights(), group.kernel.tables, strict=True
        ):
            shards = dmp.module.table_shards()[dmp.module.tables[number].name]
            at = list(shards.local_weights).index(position)
            assert list(shards.parameters())[at].data_ptr() == weight.data_ptr() == table.weight.data_ptr()
            states = shards.states[position]
            assert len(weight) == table.capacity == len(states["ids"])
            assert states["ids"].data_ptr() == table.index.keys.data_ptr()


def grown(scheme: str, optimizer: str, more: dict[str, Any]) -> dict[str, Any]:
    reference, dmp = both(optimizer, scheme, **more)
    first, bytes_before = slots(dmp), dmp.memory_bytes()
    parameters = [id(parameter) for parameter in dmp.parameters()]
    capacities, evictions = [slots(dmp)], 0
    for seed in range(5):
        evictions = compared(reference, dmp, 8, seed)
        capacities.append(slots(dmp))
    assert_views(dmp)
    assert parameters == [id(parameter) for parameter in dmp.parameters()]
    own = [table for (name, _), table in dmp.module.dynamic_tables().items() if name == "user"]
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *(table.index.keys[table.index.slots()] for table in own)])
    return {
        "capacities": capacities,
        "evictions": evictions,
        "present": bool(reference.table("user").index.contains(ids).all()),
        "ids": len(ids),
        "size": reference.table("user").size,
        "first": first,
        "bytes": [bytes_before, dmp.memory_bytes()],
    }


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("row_wise", "adam", {}),
    ("column_wise", "row-wise adagrad", {"admit": 2}),
    ("table_wise", "sgd", {}),
]


def everything() -> list[dict[str, Any]]:
    return [grown(*case) for case in CASES]


def test_shards_grow_as_the_whole_table_and_then_evict_the_same_ids(two: Any) -> None:
    found = two.run(everything)
    for case, ranks in zip(CASES, zip(*found, strict=True), strict=True):
        for rank in ranks:
            assert rank["present"], case
            assert rank["capacities"] == sorted(rank["capacities"]), case
            assert rank["evictions"] > 0 or case[2], case  # with admission, fewer ids have rows
        if case[0] == "column_wise":  # each rank has all ids
            assert [rank["ids"] for rank in ranks] == [ranks[0]["size"]] * 2
        else:
            assert sum(rank["ids"] for rank in ranks) == ranks[0]["size"]
        copies = 2 if case[0] == "column_wise" else 1
        assert sum(rank["first"] for rank in ranks) == 1024 * copies
        last = sum(rank["capacities"][-1] for rank in ranks)
        assert last == MOST * copies, case
        for kind in ("weights", "index") if not case[2] else ():  # the item table doubles
            before, after = (sum(rank["bytes"][n].get(kind, 0) for rank in ranks) for n in range(2))
            assert after > 1.7 * before, (case, kind)


def saved(folder: str) -> list[int]:
    """Saves a checkpoint and a dump after each of three stages of growth."""
    reference, dmp = both("adam", "row_wise")
    rows = []
    for stage in range(3):
        compared(reference, dmp, 6, stage)
        save_checkpoint(f"{folder}/checkpoint{stage}", dmp)
        dmp.dump(f"{folder}/dump{stage}")
        state, optimizer = dmp.state_dict(), dmp.fused_optimizer.state_dict()
        rows.append(state["embedding_bags.user.weight"].metadata().size[0])
        assert optimizer["state"]["embedding_bags.user.weight"]["user.momentum1"].metadata().size[0] == rows[-1]
    whole = dmp.full_state_dict()
    before = {name: value.clone() for name, value in index_of(dmp).items()}
    small = both("adam", "row_wise")[1]
    small.load_state_dict(dmp.state_dict())
    small.fused_optimizer.load_state_dict(dmp.fused_optimizer.state_dict())
    assert all(torch.equal(before[name], value) for name, value in index_of(small).items())
    from_whole = both("adam", "table_wise")[1]
    from_whole.load_state_dict(whole)
    other = from_whole.full_state_dict()
    assert all(torch.equal(value, other[name]) for name, value in whole.items())
    return rows


def loaded(folder: str, many: int) -> list[str]:
    """Continues from each checkpoint and dump, read into smaller and into larger tables."""
    found = []
    for kind in ("checkpoint", "dump"):
        larger = None
        for stage in (2, 0, 1):
            reference = collection("pooled", "adam", max_capacity=MOST)
            for seed in range(stage + 1):
                for parts in batches(6, many, seed):
                    reference(batch_of(parts, range(many))).values().pow(2).sum().backward()
            smaller = both("adam", "column_wise")[1]
            larger = larger or both("adam", "table_wise")[1]
            for dmp in (smaller, larger):
                path = f"{folder}/{kind}{stage}"
                load_checkpoint(path, dmp) if kind == "checkpoint" else dmp.load(path)
                assert_views(dmp)
                for parts in batches(1, world()[1], 9):
                    reference.eval(), dmp.eval()
                    rank, ranks = world()
                    whole = reference(batch_of(parts, range(ranks))).values()
                    own = dmp(batch_of(parts, range(rank, rank + 1))).values()
                    torch.testing.assert_close(own, whole[rank * 8 : rank * 8 + 8], rtol=1e-9, atol=1e-9)
                dmp.train()
                dmp.reshard(plan_of(dmp.module, "row_wise"))
                dmp.reshard(plan_of(dmp.module, "table_wise"))
            reference.train()
            compared(reference, larger, 2, 5)
            found.append(f"{kind}{stage}")
    return found


def test_checkpoints_and_dumps_of_a_growing_table_load_at_another_number_of_ranks(two: Any, tmp_path: Path) -> None:
    for rows in two.run(saved, str(tmp_path)):
        assert rows == [2048, 2048, MOST]
    for found in [*two.run(loaded, str(tmp_path), 2), loaded(str(tmp_path), 2)]:  # on two ranks, and on one
        assert len(found) == 6

"""Moving tilings: every cell of every target, exactly once, from a source that holds it."""

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recshard_lab.comm import ShardingEnv, trace
from recshard_lab.distributed.reshard import Move, move, transfers
from recshard_lab.sharding import Shard
from tests.distributed import cases


@st.composite
def two_tilings(draw: Any, world_size: int) -> tuple[dict[str, Any], list[Shard], list[Shard]]:
    table = {"num_embeddings": draw(st.integers(1, 20)), "embedding_dim": draw(st.integers(1, 12))}
    return table, *(list(draw(cases.tilings(table, world_size)).shards) for _ in range(2))  # type: ignore[return-value]


@given(drawn=two_tilings(4))
def test_transfers_fill_every_target_cell_once_from_a_source_that_holds_it(drawn: Any) -> None:
    _, sources, targets = drawn
    for number, target in enumerate(targets):
        filled = torch.zeros(target.num_rows, target.num_cols)
        for transfer in transfers(sources, targets):
            if transfer.target != number:
                continue
            (r0, r1), (c0, c1) = transfer.rect
            source = sources[transfer.source]
            assert source.rows[0] <= r0 < r1 <= source.rows[1]
            assert source.cols[0] <= c0 < c1 <= source.cols[1]
            assert (transfer.source_rank, transfer.target_rank) == (source.rank, target.rank)
            filled[r0 - target.rows[0] : r1 - target.rows[0], c0 - target.cols[0] : c1 - target.cols[0]] += 1
        assert torch.equal(filled, torch.ones_like(filled))


@given(drawn=two_tilings(4))
def test_what_already_lies_on_the_targets_rank_does_not_travel(drawn: Any) -> None:
    _, sources, _ = drawn
    assert all(t.source_rank == t.target_rank for t in transfers(sources, sources))


def run_move(size: tuple[int, int], sources: list[Shard], targets: list[Shard], round_bytes: int) -> tuple[bool, int]:
    """On a rank: fills its sources from a known table, moves, compares."""
    env = ShardingEnv.default()
    table = torch.arange(size[0] * size[1], dtype=torch.float32).view(size) - 0.0
    held = {n: table[slice(*s.rows), slice(*s.cols)].clone() for n, s in enumerate(sources) if s.rank == env.rank}
    wanted = {n: torch.full((s.num_rows, s.num_cols), -1.0) for n, s in enumerate(targets) if s.rank == env.rank}
    with trace() as traced:
        sent = move([Move(torch.float32, sources, targets, held, wanted)], env, torch.device("cpu"), round_bytes)
    right = all(torch.equal(wanted[n], table[slice(*targets[n].rows), slice(*targets[n].cols)]) for n in wanted)
    assert sent == traced.bytes_sent("reshard")
    largest = max((event.bytes_sent for event in traced.events), default=0)
    return right, largest


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_tiling_moves_to_any_other_bit_for_bit_in_bounded_messages(ranks: Any, data: st.DataObject) -> None:
    table, sources, targets = data.draw(two_tilings(ranks.world_size))
    size = (table["num_embeddings"], table["embedding_dim"])
    bound = data.draw(st.sampled_from([256, 1 << 20]))
    for right, largest in ranks.run(run_move, size, sources, targets, bound):
        assert right
        assert largest <= bound

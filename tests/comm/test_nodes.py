"""Virtual nodes: groups inside and across them, and an emulated link between them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import recshard_lab
from recshard_lab.comm import InterNodeLink, ReplicaGrid, ShardingEnv, all_reduce, all_to_all, sizes_env, wire
from tests.patience import scaled


@pytest.fixture
def ranks() -> Iterator[Any]:
    """Two nodes of two ranks."""
    with recshard_lab.launch(4, nodes=2) as launched:
        yield launched


def sums_by_node() -> tuple[int, int, int, float, float]:
    env = ShardingEnv.default()
    intra, inter = env.node_envs()
    inside, across = torch.tensor([2.0**env.rank]), torch.tensor([2.0**env.rank])
    dist.all_reduce(inside, group=intra.pg)
    dist.all_reduce(across, group=inter.pg)
    return env.node, intra.rank, inter.rank, float(inside), float(across)


def test_groups_are_the_rows_and_columns_of_nodes_by_local_ranks(ranks: Any) -> None:
    expected = [(0, 0, 0, 1 + 2, 1 + 4), (0, 1, 0, 1 + 2, 2 + 8), (1, 0, 1, 4 + 8, 1 + 4), (1, 1, 1, 4 + 8, 2 + 8)]
    assert ranks.run(sums_by_node) == expected
    assert ranks.run(sums_by_node) == expected, "asked for again, the same groups serve"


LINK = {wire.LATENCY_VARIABLE: "20.0", wire.BANDWIDTH_VARIABLE: "1e-12"}


def slept(elements: int) -> list[list[float]]:
    """Seconds that exchanges would sleep: in the node, with every rank, in the group of the node, in one across."""
    env = ShardingEnv.default()
    intra, inter = env.node_envs()
    node, pair = [elements * (rank // 2 == env.node) for rank in range(4)], [elements] * 2
    found: list[list[float]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LINK.items():
            patch.setenv(name, value)
        for group, splits in ((env, node), (env, [elements] * 4), (intra, pair), (inter, pair)):
            found.append([])
            patch.setattr(wire, "sleep", found[-1].append)
            received = all_to_all(torch.full((sum(splits),), float(group.rank)), splits, splits, group, "test")
            assert received.tolist() == [float(rank) for rank, count in enumerate(splits) for _ in range(count)]
    return found


def test_what_crosses_nodes_waits_for_the_emulated_bandwidth_and_nothing_else(ranks: Any) -> None:
    link = InterNodeLink(latency_ms=20.0, gbps=1e-12)  # days, so that the time since the exchange began is nothing
    for inside, across, within, between in ranks.run(slept, 10):
        assert inside == within == []
        assert across == pytest.approx([link.min_ms(2 * 10 * 4) / 1e3], rel=0.01)
        assert between == pytest.approx([link.min_ms(10 * 4) / 1e3], rel=0.01)  # a group of the size of a node


def test_without_a_link_nothing_waits_and_with_one_it_is_read_back(monkeypatch: Any) -> None:
    assert InterNodeLink.from_environment() is None
    monkeypatch.setenv(wire.LATENCY_VARIABLE, "1.5")
    assert InterNodeLink.from_environment() == InterNodeLink(1.5)
    monkeypatch.setenv(wire.BANDWIDTH_VARIABLE, "10.0")
    assert InterNodeLink.from_environment() == InterNodeLink(1.5, 10.0)
    for latency, gbps, named in ((-1.0, None, "latency"), (0.0, 0.0, "bandwidth")):
        with pytest.raises(ValueError, match=named):
            InterNodeLink(latency, gbps)


def groups_of_a_pair() -> tuple[list[str], list[float]]:
    """Names of groups of ranks 2 and 1, of which rank 1 has made two more groups before, and a sum over each."""
    rank = dist.get_rank()
    pair = dist.new_group([2, 1], sort_ranks=False)
    for _ in range(2 * (rank == 1)):
        dist.new_group([1], use_local_synchronization=True)
    if rank == 0:
        return [], []
    env = ShardingEnv.from_process_group(pair)
    envs = [env, env.duplicate(), sizes_env(env), env.duplicate(), ReplicaGrid(env, 1).replicas, *env.node_envs()]
    totals = []
    for own in envs:
        assert own.rank in (0, env.rank)
        totals.append(float(all_reduce(torch.tensor([2.0**rank]), own, "test")))
    return [own.pg.group_name for own in envs], totals


def test_ranks_that_have_made_different_numbers_of_groups_make_further_ones() -> None:
    with recshard_lab.launch(3) as ranks:
        _, (names, totals), (same, other) = ranks.call(groups_of_a_pair, timeout_s=scaled(30))
    assert totals[:-1] == other[:-1] == [6.0] * 6
    assert (totals[-1], other[-1]) == (2.0, 4.0)  # a node of two
    assert names[:-1] == same[:-1]
    assert len({*names, *same}) == 8

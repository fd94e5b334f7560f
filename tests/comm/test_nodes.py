"""Virtual nodes: groups inside and across them, and an emulated road between them."""

import os
from time import perf_counter

import pytest
import torch
import torch.distributed as dist

import recshard_lab
from recshard_lab.comm import InterNodeLink, ReplicaGrid, ShardingEnv, all_reduce, all_to_all, sizes_env


def sums_by_node() -> tuple[int, int, int, float, float]:
    env = ShardingEnv.default()
    intra, inter = env.node_envs()
    inside, across = torch.tensor([2.0**env.rank]), torch.tensor([2.0**env.rank])
    dist.all_reduce(inside, group=intra.pg)
    dist.all_reduce(across, group=inter.pg)
    return env.node, intra.rank, inter.rank, float(inside), float(across)


def test_groups_are_the_rows_and_columns_of_nodes_by_local_ranks() -> None:
    with recshard_lab.launch(4, nodes=2) as ranks:
        assert ranks.run(sums_by_node) == [
            (0, 0, 0, 1 + 2, 1 + 4),
            (0, 1, 0, 1 + 2, 2 + 8),
            (1, 0, 1, 4 + 8, 1 + 4),
            (1, 1, 1, 4 + 8, 2 + 8),
        ]
        assert ranks.run(sums_by_node)[3] == (1, 1, 1, 4 + 8, 2 + 8), "asked for again, the same groups serve"


def timed(link: dict[str, str], elements: int) -> tuple[float, float]:
    """Milliseconds of an exchange within the node alone, and of one with every rank."""
    os.environ.update(link)
    env = ShardingEnv.default()
    found = []
    for peers in ([r for r in range(4) if r // 2 == env.node], list(range(4))):
        splits = [elements if rank in peers else 0 for rank in range(4)]
        dist.barrier()
        begun = perf_counter()
        received = all_to_all(torch.full((sum(splits),), float(env.rank)), splits, splits, env, "test")
        found.append((perf_counter() - begun) * 1e3)
        assert received.tolist() == [float(rank) for rank in range(4) for _ in range(splits[rank])]
    return found[0], found[1]


def test_only_what_crosses_nodes_waits_for_the_emulated_bandwidth() -> None:
    elements, gbps = 250_000, 0.1  # 1 MB to each rank, 2 MB across nodes: 160 ms
    link = InterNodeLink(latency_ms=20.0, gbps=gbps)
    with recshard_lab.launch(4, nodes=2) as ranks:
        for inside, across in ranks.run(timed, link.environment(), elements):
            assert across >= link.min_ms(2 * elements * 4)
            assert inside < link.min_ms(2 * elements * 4) / 2


def crossing(link: dict[str, str], elements: int) -> tuple[float, float]:
    """Milliseconds of an exchange inside this rank's node, and of one between the nodes, each in a group of its own."""
    os.environ.update(link)
    found = []
    for env in ShardingEnv.default().node_envs():
        dist.barrier()
        begun = perf_counter()
        all_to_all(torch.zeros(2 * elements), [elements] * 2, [elements] * 2, env, "test")
        found.append((perf_counter() - begun) * 1e3)
    return found[0], found[1]


def test_a_group_that_crosses_nodes_waits_even_if_it_is_as_large_as_a_node() -> None:
    link = InterNodeLink(latency_ms=20.0, gbps=0.1)
    with recshard_lab.launch(4, nodes=2) as ranks:
        for inside, across in ranks.run(crossing, link.environment(), 250_000):
            assert across >= link.min_ms(250_000 * 4)
            assert inside < link.min_ms(250_000 * 4) / 2


def test_without_a_link_nothing_waits_and_with_one_it_is_read_back() -> None:
    assert InterNodeLink.from_environment({}) is None
    link = InterNodeLink(1.5, 10.0)
    assert InterNodeLink.from_environment(link.environment()) == link


@pytest.mark.parametrize(("latency", "gbps", "named"), [(-1.0, None, "latency"), (0.0, 0.0, "bandwidth")])
def test_a_link_that_cannot_be_is_refused(latency: float, gbps: float | None, named: str) -> None:
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
    envs = [env, env.twin(), sizes_env(env), env.twin(), ReplicaGrid(env, 1).replicas, *env.node_envs()]
    totals = []
    for own in envs:
        assert own.rank in (0, env.rank)
        totals.append(float(all_reduce(torch.tensor([2.0**rank]), own, "test")))
    return [own.pg.group_name for own in envs], totals


def test_ranks_that_have_made_different_numbers_of_groups_make_further_ones() -> None:
    with recshard_lab.launch(3) as ranks:
        _, (names, totals), (same, other) = ranks.call(groups_of_a_pair, timeout_s=10)
        assert totals[:-1] == other[:-1] == [6.0] * 6
        assert (totals[-1], other[-1]) == (2.0, 4.0)  # a node of two
        assert names[:-1] == same[:-1]
        assert len({*names, *same}) == 8

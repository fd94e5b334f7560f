"""Virtual nodes and the emulated link between them, as `launch` sets them up."""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recshard_lab.comm import InterNodeLink, ShardingEnv, all_to_all
from recshard_lab.launcher import LaunchError, current, launch
from recshard_lab.launcher.shape import Shape

pytestmark = pytest.mark.timeout(60)


def exchange_ms(elements: int) -> tuple[float, float]:
    """Milliseconds of an exchange inside the node, and of one with every rank."""
    env = ShardingEnv.default()
    found = []
    for peers in ([r for r in range(4) if r // 2 == env.node], list(range(4))):
        splits = [elements if rank in peers else 0 for rank in range(4)]
        dist.barrier()
        begun = perf_counter()
        all_to_all(torch.ones(sum(splits)), splits, splits, env, "test")
        found.append((perf_counter() - begun) * 1e3)
    return found[0], found[1]


def test_an_exchange_that_crosses_nodes_waits_for_the_link_and_one_inside_does_not() -> None:
    link = InterNodeLink(latency_ms=20.0, gbps=0.1)
    least = link.min_ms(2 * 250_000 * 4)  # 1 MB to each of two ranks: 180 ms
    with launch(4, nodes=2, inter_node_latency_ms=20, inter_node_gbps=0.1) as ranks:
        assert "4 ranks on 2 virtual nodes (emulated link between them: 20 ms, 0.1 Gbit/s a rank)" in repr(ranks)
        assert "emulated" in ranks.shape.notice()
        assert ranks.run(InterNodeLink.from_environment) == [link] * 4
        for inside, across in ranks.run(exchange_ms, 250_000):
            assert across >= least
            assert inside < least / 2


def test_ranks_know_their_node_as_under_torchrun() -> None:
    names = ("NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
    with launch(4, nodes=2) as ranks:
        seen = ranks.run(lambda: [int(os.environ[name]) for name in names])
    assert seen == [[r // 2, r // 2, 2, r % 2, 2, r, 4] for r in range(4)]


def test_a_link_is_only_what_the_launch_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECSHARD_INTER_NODE_LATENCY_MS", "1000")
    with launch(2, nodes=2) as ranks:
        assert ranks.run(InterNodeLink.from_environment) == [None, None]
        with pytest.raises(LaunchError, match=r"2 virtual nodes \(emulated link between them: 1 ms\) over gloo, but 2"):
            launch(2, nodes=2, inter_node_latency_ms=1)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"n": 2, "inter_node_latency_ms": 5.0}, r"inter_node_latency_ms=5.0, nodes=1.*Fix: nodes=2"),
        ({"n": 2, "inter_node_gbps": 1}, r"inter_node_gbps=1, nodes=1.*Fix: nodes=2"),
        ({"n": 2, "nodes": 2, "inter_node_latency_ms": -1.0}, r"inter_node_latency_ms=-1.0\): expected .* at least 0"),
        ({"n": 2, "nodes": 2, "inter_node_gbps": 0}, r"inter_node_gbps=0\): expected a number above 0"),
        ({"n": 2, "nodes": 2, "inter_node_gbps": float("nan")}, r"gbps=nan\): expected a number"),
        ({"n": 2, "nodes": 2, "inter_node_gbps": "fast"}, r"gbps='fast'\): expected a number"),
    ],
)
def test_links_that_cannot_be_are_refused_by_name(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        launch(**asked)
    assert current() is None


def test_a_link_without_latency_or_without_a_limit_says_only_what_it_has() -> None:
    assert Shape.checked(2, 2, inter_node_gbps=2.5).link == "emulated link between them: 2.5 Gbit/s a rank"
    assert Shape.checked(2, 2, inter_node_latency_ms=0).variables() == {"RECSHARD_INTER_NODE_LATENCY_MS": "0.0"}
    assert Shape.checked(2, 2).link == ""

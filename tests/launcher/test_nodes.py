"""Virtual nodes and the emulated link between them, as `launch` sets them up."""

from __future__ import annotations

import os

import pytest

from recshard_lab.comm import InterNodeLink
from recshard_lab.launcher import LaunchError, launch
from recshard_lab.launcher.shape import Shape

pytestmark = pytest.mark.timeout(60)


def test_ranks_know_their_node_and_their_link() -> None:
    names = ("NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
    with launch(4, nodes=2, inter_node_latency_ms=20, inter_node_gbps=0.1) as ranks:
        assert "4 ranks on 2 virtual nodes (emulated link between them: 20 ms, 0.1 Gbit/s a rank)" in repr(ranks)
        assert "emulated" in ranks.shape.notice()
        assert ranks.run(InterNodeLink.from_environment) == [InterNodeLink(latency_ms=20.0, gbps=0.1)] * 4
        assert [status.node for status in ranks.status()] == [0, 0, 1, 1]
        seen = ranks.run(lambda: [int(os.environ[name]) for name in names])
    assert seen == [[r // 2, r // 2, 2, r % 2, 2, r, 4] for r in range(4)]


def test_a_link_is_only_what_the_launch_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECSHARD_INTER_NODE_LATENCY_MS", "1000")
    with launch(2, nodes=2) as ranks:
        assert ranks.run(InterNodeLink.from_environment) == [None, None]
        with pytest.raises(LaunchError, match=r"2 virtual nodes \(emulated link between them: 1 ms\) over gloo, but 2"):
            launch(2, nodes=2, inter_node_latency_ms=1)
    assert Shape.checked(2, 2, inter_node_gbps=2.5).link == "emulated link between them: 2.5 Gbit/s a rank"
    assert Shape.checked(2, 2, inter_node_latency_ms=0).variables() == {"RECSHARD_INTER_NODE_LATENCY_MS": "0.0"}
